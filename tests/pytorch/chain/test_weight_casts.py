"""The weights of a chain are cast in few launches, with the same codes as cast one by one.

This is done where every call casts the weights.
"""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch.fp8.casts import batches as casts
from transformer_engine.pytorch.fp8.recipes.current import CurrentQuantizer
from transformer_engine.pytorch.fp8.recipes.delayed import DelayedQuantizer

RECIPES = {"delayed": DelayedScaling(amax_history_len=2), "current": Float8CurrentScaling()}


@pytest.fixture
def batches(monkeypatch):
    """The number of weights of each call of `quantize_many`."""
    sizes = []
    original = casts.quantize_many

    def counted(tensors, *arguments):
        sizes.append(len(tensors))
        original(tensors, *arguments)

    monkeypatch.setattr(casts, "quantize_many", counted)
    return sizes


def layer(device):
    torch.manual_seed(0)
    return te.TransformerLayer(
        *(32, 64, 2),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        device=device,
    )


def trained(module, x, recipe="delayed", **call):
    """Results and gradients of three steps, between which the scales change."""
    found = []
    for _ in range(3):
        module.zero_grad()
        with te.fp8_autocast(fp8_recipe=RECIPES[recipe]):
            y = module(x, **call)
        y.backward(torch.ones_like(y))
        found += [y.detach(), *(p.grad for p in module.parameters())]
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_results_are_those_of_single_casts(recipe, batches, monkeypatch, device):
    x = torch.randn(16, 2, 32, device=device, dtype=torch.bfloat16)
    found = trained(layer(device), x, recipe)
    assert batches and max(batches) > 1
    for quantizer in (DelayedQuantizer, CurrentQuantizer):
        monkeypatch.setattr(quantizer, "casts_many", False)
    batches.clear()
    expected = trained(layer(device), x, recipe)
    assert not batches
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_weights_that_are_not_cast_by_every_call(batches, device):
    x = torch.randn(16, 2, 32, device=device, dtype=torch.bfloat16)
    trained(layer(device), x, is_first_microbatch=True)
    with te.fp8_model_init():
        trained(layer(device), x)
    with te.fp8_autocast(fp8_recipe=Float8BlockScaling()):
        layer(device)(x)
    layer(device)(x)
    assert not batches


def test_sides_differ(batches, device):
    """The first weight needs no column-wise side if nothing before it needs a gradient."""
    mlp = te.LayerNormMLP(32, 64, params_dtype=torch.bfloat16, device=device)
    mlp.layer_norm_weight.requires_grad_(False)
    mlp.layer_norm_bias.requires_grad_(False)
    x = torch.randn(16, 32, device=device, dtype=torch.bfloat16)
    for steps in range(3):
        with te.fp8_autocast(fp8_recipe=DelayedScaling()):
            mlp(x).sum().backward()
        assert not batches, steps
    with torch.no_grad(), te.fp8_autocast(fp8_recipe=DelayedScaling()):
        mlp(x)
    assert batches == [2]
