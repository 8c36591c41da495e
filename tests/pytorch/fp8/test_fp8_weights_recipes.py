"""Recipes that can make FP8 weights, and recipes of autocasts that can use them."""

import math

import pytest
import torch
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(use_power_2_scales=True),
    "blocks": Float8BlockScaling(),
}


def test_recipes_of_another_family_are_refused() -> None:
    x = torch.randn(16, 32)
    with te.fp8_model_init(recipe=RECIPES["current"]):
        module = te.Linear(32, 48, device="cpu", name="first")
    with (
        te.fp8_autocast(),
        pytest.raises(RuntimeError, match=r"Recipe mismatch for 'weight'.*first"),
    ):
        module(x)
    with te.fp8_autocast(fp8_recipe=RECIPES["current"]):
        module(x)
    with te.fp8_model_init():  # without a recipe, so for both recipes with one scale
        module = te.Linear(32, 48, device="cpu")
    with te.fp8_model_init(recipe=RECIPES["blocks"]):
        in_blocks = te.Linear(32, 48, device="cpu")
    for name, recipe in RECIPES.items():
        ours, other, scaling = module, in_blocks, "block"
        if name == "blocks":
            ours, other, scaling = in_blocks, module, "per-tensor"
        with te.fp8_autocast(fp8_recipe=recipe):
            ours(x)
            with pytest.raises(RuntimeError, match=f"made for {scaling} scaling, got"):
                other(x)
    with pytest.raises(ValueError, match="expected recipe to be DelayedScaling"):
        te.fp8_model_init(recipe=type("Other", (type(RECIPES["delayed"]).__mro__[1],), {})())
    with pytest.raises(ValueError, match="expected w_block_scaling_dim=2, got 1"):
        te.fp8_model_init(recipe=Float8BlockScaling(w_block_scaling_dim=1))


def test_margin_and_rounding_of_the_recipe() -> None:
    values = torch.randn(32, 16)
    for recipe, expected in (
        (DelayedScaling(margin=1), 448 / values.abs().max() / 2),
        (DelayedScaling(margin=-1), 448 / values.abs().max()),
        (RECIPES["current"], 2 ** torch.floor(torch.log2(448 / values.abs().max()))),
    ):
        with te.quantized_model_init(recipe=recipe):
            layer = te.Linear(16, 32, device="cpu", init_method=lambda w: w.copy_(values))
        assert layer.weight._scale_inv[1].item() == expected.item()
        before = layer.weight.dequantize().detach()
        for _ in range(4):
            with torch.no_grad():
                layer.weight.mul_(1.0)
        # A write may round values, but does not clip them.
        torch.testing.assert_close(layer.weight.dequantize().amax(), before.amax())
    for exact in (True, False):
        recipe = Float8BlockScaling(use_f32_scales=exact)
        with te.quantized_model_init(recipe=recipe):
            layer = te.Linear(16, 32, device="cpu", init_method=lambda w: w.copy_(values))
        scale = math.log2(1 / layer.weight._rowwise_scale_inv[0, 0].item())
        exactly = math.log2(448 / values.abs().max().item())
        assert scale == pytest.approx(exactly if exact else math.floor(exactly), abs=1e-6)


def test_blocks_that_users_made(device: str) -> None:
    """An error about blocks that GEMMs cannot take names the weight and the layer."""
    module = te.Linear(160, 176, device=device, name="proj")
    x, values = torch.randn(16, 160, device=device), module.weight.detach()

    def blocks(dimensions: int, rowwise: bool = True) -> torch.nn.Parameter:
        quantizer = te.Float8BlockQuantizer(
            te.DType.kFloat8E4M3, rowwise=rowwise, columnwise=True, block_scaling_dim=dimensions
        )
        return torch.nn.Parameter(quantizer(values))

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        with te.fp8_autocast(fp8_recipe=RECIPES["blocks"]):
            out = module(leaf)
        out.square().sum().backward()
        return out.detach(), leaf.grad

    expected = step()
    module.weight = blocks(2)
    for ours, theirs in zip(step(), expected, strict=True):
        assert_bitwise(ours, theirs)
    module.weight = blocks(1)
    with pytest.raises(RuntimeError, match=r"Recipe mismatch for 'weight'.*layer proj"):
        step()
    module.weight = blocks(2, rowwise=False)
    with pytest.raises(RuntimeError, match=r"expected row-wise codes in 'weight'.*layer proj"):
        step()
