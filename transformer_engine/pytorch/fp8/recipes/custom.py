"""`CustomRecipe`: a function of the user chooses the quantizer of each tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.common.roles import NO_QUANTIZER
from transformer_engine.pytorch.dtypes import E4M3, E5M2
from transformer_engine.pytorch.fp8.casts.quantizers import (
    DESCRIBED,
    IDENTITY,
    GemmQuantizers,
    Quantizer,
)
from transformer_engine.pytorch.fp8.recipes.base import RecipeRules, register
from transformer_engine.pytorch.fp8.recipes.delayed import DelayedQuantizer

if TYPE_CHECKING:
    from transformer_engine.pytorch.fp8.scaled_module import ScaledModule

_TENSORS = ("input", "weight", "grad_output")
_OPERANDS = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}


@register(CustomRecipe)
class CustomRules(RecipeRules):
    """The rules of `CustomRecipe`.

    Compiled code takes the answers of the function for constants. Its guards are the names of GEMMs
    and `Answers.number`.
    """

    def module_quantizers(self, recipe: CustomRecipe, module: ScaledModule) -> list[GemmQuantizers]:
        """Those that the function has chosen for the names of the GEMMs."""
        answers = getattr(recipe, "answers", None)
        if answers is None or not answers.number:
            raise RuntimeError(
                "[CustomRecipe] expected a recipe that was made before compiled code runs, got one"
                f" that compiled code makes (layer {module.name})"
            )
        return [_chosen(recipe, module.module_type, name) for name in module.gemm_names]

    def refusal_of_weights(self, recipe: CustomRecipe) -> str:
        """Weights are made before the function is asked about them."""
        return (
            "expected a recipe that says how weights are kept in FP8, got CustomRecipe, whose"
            " function chooses quantizers for calls; use another recipe for these modules"
        )


def _chosen(recipe: CustomRecipe, kind: str, layer: str) -> GemmQuantizers:
    """The quantizers of one GEMM.

    Without a quantizer of the gradient, the GEMMs of the backward have one operand in FP8, which
    none multiplies: they run in high precision, on the values of the codes of the forward.
    """
    three = {tensor: _quantizer(recipe, kind, tensor, layer) for tensor in _TENSORS}
    cast = three["input"].is_fp8
    override = "dequantized" if cast and not three["grad_output"].is_fp8 else None
    for gemm in ("fprop",) if override else _OPERANDS:
        _check(gemm, three, layer)
    gemms = GemmQuantizers(**three, backward_override=override)
    gemms.fast_accumulation = (cast and _layout(three["input"]).fast_accumulation, False, False)
    return gemms


def _quantizer(recipe: Any, kind: str, tensor: str, layer: str) -> Quantizer:
    """The quantizer of a tensor, one of those that modules use."""
    role = (kind, tensor, layer)
    settings = recipe.answers.settings(*role)
    if settings is None:
        return IDENTITY
    if settings and settings[0] == NO_QUANTIZER:
        raise TypeError(
            f"[CustomRecipe] expected qfactory to return a quantizer or None for {tensor}, got"
            f" {settings[1]} (layer {layer})"
        )
    if settings:
        name, *others, epsilon = settings
        native: Any = DESCRIBED[name]
        return native(*others, float(epsilon))
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "[CustomRecipe] expected Float8CurrentScalingQuantizer, Float8BlockQuantizer or None in"
            f" compiled code, got a quantizer of another kind for {tensor} (layer {layer})"
        )
    made = recipe.answers.answer(*role)
    if isinstance(made, DelayedQuantizer):
        raise NotImplementedError(
            "[CustomRecipe] expected quantizers without scaling state, got"
            f" {type(made).__name__} for {tensor}; use Float8CurrentScalingQuantizer here, or"
            f" DelayedScaling as the recipe (layer {layer})"
        )
    return made


def _check(gemm: str, three: dict[str, Quantizer], layer: str) -> None:
    """Raise unless a GEMM multiplies what these quantizers make of its operands."""
    a, b = [three[tensor] for tensor in _OPERANDS[gemm]]
    if not (a.is_fp8 or b.is_fp8):
        return
    if a.is_fp8 is not b.is_fp8:
        expected = "quantizers for both operands or for none"
    elif not _layout(a).multiplies(_layout(b)):
        expected = "scales of blocks in both operands or in neither"
    elif _layout(a).dimensions == _layout(b).dimensions == 2:
        expected = "1D blocks in one operand at least"
    elif _layout(a).in_blocks and not a.format == b.format == E4M3:
        expected = "E4M3 in both operands, because they have scales of blocks"
    elif a.format == b.format == E5M2:
        expected = "E5M2 in one operand at most"
    else:
        return
    got = [f"{_described(three[tensor])} for {tensor}" for tensor in _OPERANDS[gemm]]
    raise ValueError(
        f"[CustomRecipe] expected {expected} of {gemm}, got {' and '.join(got)} (layer {layer})"
    )


def _layout(quantizer: Any) -> Any:
    return quantizer.layout


def _described(quantizer: Quantizer) -> str:
    if not quantizer.is_fp8:
        return "None"
    if torch.compiler.is_compiling():  # Dynamo of torch 2.11 traces no repr of an object
        return type(quantizer).__name__
    return repr(quantizer.public() or quantizer)
