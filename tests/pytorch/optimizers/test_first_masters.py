"""FusedAdam's first masters: the values before the cast to FP8, or those of written weights."""

import pytest
import torch
from rulers import assert_bitwise
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, QParams
from transformer_engine.pytorch.optimizers import FusedAdam

RECIPES = {
    "delayed": DelayedScaling(),
    "blocks": Float8BlockScaling(),
    "blocks with fp32 scales": Float8BlockScaling(
        fp8_quant_fwd_weight=QParams(power_2_scale=False, amax_epsilon=0.0)
    ),
}


def one_changed(weight: torch.Tensor) -> torch.Tensor:
    values = weight.dequantize()
    values[-1, -1] = -values[-1, -1]
    return values


WRITES = {
    "load": lambda layer, values: layer.load_state_dict({"weight": values}),
    "copy": lambda layer, values: layer.weight.data.copy_(values),
    "data": lambda layer, values: setattr(layer.weight, "data", values),
    "init": lambda layer, values: nn.init.zeros_(layer.weight),
    "double": lambda layer, values: layer.weight.data.mul_(2.0),
    "one element": lambda layer, values: layer.weight.data.copy_(one_changed(layer.weight)),
}


def made(recipe: str, device: str) -> te.Linear:
    torch.manual_seed(0)
    with te.fp8_model_init(recipe=RECIPES[recipe], preserve_high_precision_init_val=True):
        return te.Linear(144, 160, bias=False, device=device)


def first_master(layer: te.Linear) -> torch.Tensor:
    """The master after a step that changes no value."""
    optimizer = FusedAdam(layer.parameters(), lr=0.0, master_weights=True)
    layer.weight.grad = torch.zeros(layer.weight.shape, device=layer.weight.device)
    optimizer.step()
    return optimizer.state[layer.weight]["master_param"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_values_before_the_cast(recipe: str, device: str) -> None:
    layer = made(recipe, device)
    initial = layer.weight.get_high_precision_init_val().to(device)
    assert_bitwise(first_master(layer), initial)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("write", WRITES)
def test_weights_that_were_written(recipe: str, write: str, device: str) -> None:
    layer = made(recipe, device)
    with torch.no_grad():
        WRITES[write](layer, torch.randn(160, 144, device=device))
    values = layer.weight.dequantize().detach().clone()
    assert_bitwise(first_master(layer), values)
    assert layer.weight.get_high_precision_init_val() is None
