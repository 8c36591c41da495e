"""`RecipeRules`: how modules run under a recipe, and the registry of rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from transformer_engine.common.recipe import Format, Recipe
from transformer_engine.pytorch.dtypes import E4M3, E5M2
from transformer_engine.pytorch.fp8.casts.quantizers import Fp8Quantizer, GemmQuantizers
from transformer_engine.pytorch.scale_layout import ScaleLayout

if TYPE_CHECKING:
    from transformer_engine.pytorch.fp8.scaled_module import ScaledModule
    from transformer_engine.pytorch.fp8.scaling_state import ScalingMembers, ScalingState
    from transformer_engine.pytorch.tensor.weight_quantizer import WeightQuantizer

Column = tuple[torch.Tensor, torch.Tensor | None]  # scale; amax, None if casts record none


class GemmColumns(NamedTuple):
    """The scales and amaxes for the casts of one GEMM, in a module's scaling state."""

    input: Column
    weight: Column
    grad_output: Column | None = None


class RecipeRules:
    """How modules run under the recipes of a class.

    A recipe has an `fp8_format`, unless its rules override whatever reads it.

    One object serves all recipes of the class, so it holds no state.

    Attributes:
        keeps_state: modules keep scales and amaxes for it (`ScalingState`), which are updated at
            the end of a step. Such a recipe has `amax_history_len` and `reduce_amax`.
        scaling: the name of its casts in statistics.
        fp8_attention: attention can run in FP8, if the recipe asks for that.
        exportable: its casts have a form in ONNX.
        weight_family: which FP8 weights of its layout may serve it, see `WeightQuantizer.family`.
    """

    keeps_state = False
    scaling = ""
    fp8_attention = False
    exportable = False
    weight_family: str | None = None

    def forward_format(self, recipe: Any) -> int:
        """Element type of activations and weights."""
        return E4M3

    def backward_format(self, recipe: Any) -> int:
        """Element type of gradients."""
        return E5M2 if recipe.fp8_format is Format.HYBRID else E4M3

    def gemm_quantizers(self, recipe: Any, columns: GemmColumns | None) -> GemmQuantizers:
        """The quantizers of one GEMM; `columns` is None unless the recipe keeps state."""
        raise NotImplementedError

    def module_quantizers(self, recipe: Any, module: ScaledModule) -> list[GemmQuantizers]:
        """The quantizers of all GEMMs of a module, under a recipe that keeps no state."""
        return [self.gemm_quantizers(recipe, None)] * module.gemm_count

    def update_scales(
        self, members: ScalingMembers, states: list[ScalingState], amaxes: torch.Tensor | None
    ) -> None:
        """End a step of these states of `members`, which are on one device.

        Args:
            members: the group's states in one direction, with recipe and table.
            states: the states to update.
            amaxes: the amaxes of the step, reduced over ranks; None on a single rank.
        """
        raise NotImplementedError

    def constants(self, recipe: Any) -> tuple[tuple[str, Any], ...] | None:
        """The fields of a recipe that keeps state, by name; None if they may not describe it."""
        return None

    def weight_layout(self, recipe: Any) -> ScaleLayout | None:
        """The layout of weights that exist only in FP8; None if the recipe cannot use them."""
        return None

    def weight_settings(self, recipe: Any) -> dict[str, Any]:
        """Arguments of the `WeightQuantizer` that writes such weights, other than its label."""
        return {}

    def refusal_of_weights(self, recipe: Any) -> str:
        """Why the recipe cannot be used for modules with such weights; empty if it can."""
        if self.weight_layout(recipe) is None:
            return f"expected a recipe that FP8 weights can serve, got {recipe!r}"
        return ""

    def takes(self, recipe: Any, weight: WeightQuantizer) -> bool:
        """Whether GEMMs can take a weight that this quantizer writes."""
        fits = weight.layout == self.weight_layout(recipe)
        return fits and weight.family in (None, self.weight_family)

    def what_if_quantizer(self, tensor: str, format: int) -> Fp8Quantizer | None:
        """The cast of one tensor, for statistics of what this recipe would do."""
        return None


_RULES: dict[type, RecipeRules] = {type(None): RecipeRules()}
R = TypeVar("R", bound=type[RecipeRules])


def register(kind: type[Recipe]) -> Callable[[R], R]:
    """Register rules for a class of recipes; subclasses of it have them too.

    Raises:
        ValueError: the class already has rules.
    """
    if kind in _RULES:
        raise ValueError(f"[register] expected a recipe without rules, got {kind.__name__}")

    def add(rules: R) -> R:
        _RULES[kind] = rules()
        return rules

    return add


def find_rules(recipe: object) -> RecipeRules | None:
    """The rules of a recipe; None for an object without rules, such as a wrong argument."""
    for kind in type(recipe).__mro__:
        if kind in _RULES:
            return _RULES[kind]
    return None


def rules_of(recipe: Recipe | None) -> RecipeRules:
    """The rules of a recipe that was checked; for None those of high precision."""
    rules = find_rules(recipe)
    assert rules is not None
    return rules


def registered() -> dict[type[Recipe], RecipeRules]:
    """The recipes that have rules, in the order in which their classes were made."""
    return {kind: _RULES[kind] for kind in Recipe.__subclasses__() if kind in _RULES}


def recipe_names() -> str:
    """The names of these recipes, for messages: "A, B or C"."""
    *names, last = [kind.__name__ for kind in registered()]
    return f"{', '.join(names)} or {last}"


def rules_named(scaling: str) -> RecipeRules | None:
    """The rules with this name in statistics; None if there are none."""
    return next((rules for rules in _RULES.values() if rules.scaling == scaling), None)
