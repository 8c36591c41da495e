"""Graphs with `dynamic=True`, in which attributes of recipes and modules may be symbols."""

import copy

import pytest
import torch
from rulers import assert_bitwise
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch.fp8.autocast_stack import reset_autocast

FP8_ATTENTION = DelayedScaling(amax_history_len=3, fp8_dpa=True)


@pytest.fixture(autouse=True)
def _fresh():
    reset_autocast()
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*FP8 attention runs on the backend")
@pytest.mark.parametrize("recipe", [None, FP8_ATTENTION], ids=["none", "fp8_dpa"])
def test_two_modules_of_attention(recipe: DelayedScaling | None, device: str) -> None:
    module = nn.Sequential(
        *[te.MultiheadAttention(32, 2, attention_dropout=0.0, device=device) for _ in range(2)]
    )
    eager = copy.deepcopy(module)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (8, 16, 24):
        x = torch.randn(length, 2, 32, device=device, requires_grad=True)
        found = []
        for one in (compiled, eager):
            with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
                y = one(x)
            found.append((y, *torch.autograd.grad(y, x, torch.ones_like(y))))
        for got, expected in zip(*found, strict=True):
            assert (got - expected).norm() < 1e-2 * expected.norm()  # kernels may differ


@pytest.mark.parametrize("settings", [{}, {"window_size": (31, 0)}], ids=["causal", "window"])
def test_masks_that_end_bottom_right(settings: dict[str, tuple[int, int]]) -> None:
    """The diagonal is 0 for all lengths. It is no symbol, which torch's attention would refuse."""
    module = te.DotProductAttention(
        4, 8, attn_mask_type="causal_bottom_right", qkv_format="bshd", **settings
    ).eval()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (16, 24):
        x = torch.randn(2, length, 4, 8)
        assert_bitwise(compiled(x, x, x), module(x, x, x))


@pytest.mark.parametrize(
    "recipe", [Float8BlockScaling(), Float8CurrentScaling(), DelayedScaling(amax_history_len=2)]
)
def test_autocast_inside(recipe: object, device: str) -> None:
    layer = te.Linear(32, 48, device=device)

    def run(x):
        with te.fp8_autocast(fp8_recipe=recipe):
            return layer(x)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (16, 32):
        x = torch.randn(rows, 32, device=device)
        assert compiled(x).shape == (rows, 48)
    if not isinstance(recipe, DelayedScaling):
        assert_bitwise(compiled(x), run(x))
