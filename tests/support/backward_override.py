"""`backward_override` by its definition, from torch's own products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from precisions import RECIPES
from torch.nn import functional

import transformer_engine.pytorch as te
from transformer_engine.pytorch.dtypes import E4M3
from transformer_engine.pytorch.fp8.casts.operands import OperandRequest
from transformer_engine.pytorch.fp8.recipes.base import rules_of
from transformer_engine.pytorch.kernels.dequantize import dequantize

OVERRIDES = ("high_precision", "dequantized")


def overriding(recipe: str, override: str | None) -> Any:
    """Returns the recipe of `precisions` with this override."""
    return replace(RECIPES[recipe], backward_override=override)


def there_and_back(x: torch.Tensor, recipe: Any, tensor: str) -> torch.Tensor:
    """Returns the values of the codes of "input" or "weight", in the dtype of `x`."""
    quantizer = getattr(rules_of(recipe).gemm_quantizers(recipe, None), tensor)
    assert quantizer.format == E4M3
    rows = x.detach().reshape(-1, x.shape[-1]).contiguous()
    codes: Any = quantizer.operands(rows, OperandRequest(quantizer, True, False)).rowwise
    return dequantize(codes.codes, codes.format, codes.scales, x.dtype).view(x.shape)


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: Any
) -> torch.Tensor:
    """Returns the product of the casts, with the gradients that the recipe's override asks for."""
    cast_x, cast_weight = (
        there_and_back(x, recipe, "input"),
        there_and_back(weight, recipe, "weight"),
    )
    if recipe.backward_override == "dequantized":
        x, weight = x + (cast_x - x).detach(), weight + (cast_weight - weight).detach()
        return functional.linear(x, weight, bias)
    y = functional.linear(x, weight, bias)
    return y + (functional.linear(cast_x, cast_weight, bias) - y).detach()


def expected(module: Any, x: torch.Tensor, recipe: Any) -> torch.Tensor:
    """Returns the output of a Linear, LayerNormLinear or LayerNormMLP, for autograd."""
    if isinstance(module, te.Linear):
        return product(x, module.weight, module.bias, recipe)
    norm = (module.layer_norm_weight, module.layer_norm_bias, module.eps)
    x = functional.layer_norm(x, x.shape[-1:], *norm)
    if isinstance(module, te.LayerNormLinear):
        return product(x, module.weight, module.bias, recipe)
    hidden = product(x, module.fc1_weight, module.fc1_bias, recipe)
    hidden = functional.gelu(hidden, approximate="tanh")
    return product(hidden, module.fc2_weight, module.fc2_bias, recipe)
