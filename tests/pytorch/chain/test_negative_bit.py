"""Views with the negative bit: their memory holds the negated values (`x.conj().imag` is one)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rulers import assert_bitwise
from torch import nn
from torch.nn.utils import parametrize

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.attention import apply_rotary_pos_emb
from transformer_engine.pytorch.tensor import Float8BlockQuantizer, Float8CurrentScalingQuantizer


def negative(*shape: int) -> torch.Tensor:
    """Returns a contiguous random tensor with the negative bit."""
    x = torch._neg_view(torch.randn(shape))
    assert x.is_neg() and x.is_contiguous()
    return x


MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: te.Linear(32, 32, device="cpu"),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 32, device="cpu"),
    "RMSNorm": lambda: te.RMSNorm(32, device="cpu"),
    "GELU": te.ops.GELU,
    "GroupedLinear": lambda: te.GroupedLinear(1, 32, 32, device="cpu"),
    "TransformerLayer": lambda: te.TransformerLayer(
        32, 32, 2, device="cpu", hidden_dropout=0.0, attention_dropout=0.0
    ),
}
RECIPES = {"fp32": None, "delayed": DelayedScaling(), "current": Float8CurrentScaling()}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("recorded", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("kind", MODULES)
def test_modules_read_signs(kind: str, recorded: bool, recipe: str) -> None:
    module = MODULES[kind]()
    more = ([32],) if kind == "GroupedLinear" else ()

    def results(module: nn.Module, x: torch.Tensor, upstream: torch.Tensor) -> list[Any]:
        x = x.detach().requires_grad_(recorded)
        with (
            torch.set_grad_enabled(recorded),
            te.fp8_autocast(enabled=recipe != "fp32", fp8_recipe=RECIPES[recipe]),
        ):
            y = module(x, *more)
        if recorded:
            y.backward(upstream)
        return [y, x.grad]

    twin = copy.deepcopy(module)
    for _ in range(3):  # later calls run from recordings
        x, upstream = negative(16, 2, 32), negative(16, 2, 32)
        plain = results(twin, x.resolve_neg(), upstream.resolve_neg())
        for one, two in zip(results(module, x, upstream), plain, strict=True):
            if two is not None:
                assert_bitwise(one, two)


@pytest.mark.parametrize(
    "quantizer",
    [
        Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3),
        Float8BlockQuantizer(te.DType.kFloat8E4M3, rowwise=True, columnwise=True),
    ],
    ids=["tensor", "blocks"],
)
def test_quantizers_read_signs(quantizer: Any) -> None:
    x = negative(32, 32)
    plain = quantizer(x.resolve_neg()).dequantize()
    assert_bitwise(quantizer(x).dequantize(), plain)
    assert_bitwise(quantizer(torch.ones(32, 32)).copy_(x).dequantize(), plain)


def test_rotary_angles_and_inputs_have_signs() -> None:
    t, angles = negative(8, 2, 2, 16), negative(8, 1, 1, 16)
    plain = apply_rotary_pos_emb(t.resolve_neg(), angles.resolve_neg(), fused=True)
    assert_bitwise(apply_rotary_pos_emb(t, angles, fused=True), plain)


class Negated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._neg_view(x)


def test_computed_weights_have_signs() -> None:
    module, x = te.Linear(32, 32, bias=False, device="cpu"), torch.randn(16, 32)
    expected = -module(x)
    parametrize.register_parametrization(module, "weight", Negated())
    assert_bitwise(module(x), expected)
