"""An FP8 weight is replaced by a plain weight after a call, for one call or permanently."""

import pytest
import torch
from rulers import assert_bitwise
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

RECIPE = Float8CurrentScaling()


class Doubled(nn.Module):
    """Computes a plain weight from an FP8 weight."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.dequantize() * 2.0


def swap(layer: nn.Module, weight: torch.Tensor) -> None:
    torch.utils.swap_tensors(layer.weight, nn.Parameter(weight))


def set_attribute(layer: nn.Module, weight: torch.Tensor) -> None:
    del layer.weight
    layer.weight = weight


def set_parameter(layer: nn.Module, weight: torch.Tensor) -> None:
    layer._parameters["weight"] = nn.Parameter(weight)


WAYS = {
    "functional_call": None,
    "swap": swap,
    "attribute": set_attribute,
    "parameter": set_parameter,
    "parametrization": lambda layer, _: parametrize.register_parametrization(
        layer, "weight", Doubled(), unsafe=True
    ),
}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_replaced_weights(way: str, recorded: bool, device: str) -> None:
    torch.manual_seed(0)
    with te.fp8_model_init(recipe=RECIPE):
        layer = te.Linear(32, 32, bias=False, device=device)
    other = te.Linear(32, 32, bias=False, device=device)
    with torch.no_grad():
        other.weight.copy_(layer.weight.dequantize() * 2.0)
    x = torch.randn(16, 32, device=device)
    with torch.set_grad_enabled(recorded), te.fp8_autocast(fp8_recipe=RECIPE):
        before = layer(x)
        if way == "functional_call":
            found = functional_call(layer, {"weight": other.weight}, (x,))
            assert_bitwise(layer(x), before)
        else:
            WAYS[way](layer, other.weight.detach().clone())
            found = layer(x)
        assert_bitwise(found, other(x))
        assert found.requires_grad is (recorded and way != "attribute")
