"""`autocast`, under both of its names, and the default recipe."""

from __future__ import annotations

from contextlib import ContextDecorator
from types import TracebackType
from typing import Any

from transformer_engine._flags import checked_flag
from transformer_engine.common.recipe import DelayedScaling, Recipe
from transformer_engine.pytorch.fp8.autocast_stack import enter, leave
from transformer_engine.pytorch.fp8.process_state import Scope
from transformer_engine.pytorch.fp8.recipes.base import find_rules, recipe_names
from transformer_engine.pytorch.parallel.groups import check_group

_DEFAULT_RECIPE = DelayedScaling()


def get_default_recipe() -> Recipe:
    """The recipe of an autocast that names none: delayed scaling with its defaults.

    >>> get_default_recipe() == DelayedScaling()
    True
    """
    return _DEFAULT_RECIPE


def checked_recipe(recipe: Recipe | None) -> Recipe:
    """The recipe of an autocast with this argument, after checks."""
    if recipe is None:
        return get_default_recipe()
    if find_rules(recipe) is None:
        raise ValueError(
            f"[fp8_autocast] expected recipe to be {recipe_names()}, got {_described(recipe)}"
        )
    return recipe


def _described(recipe: object) -> str:
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        return f"the class {recipe.__name__}; did you mean {recipe.__name__}()?"
    return repr(recipe)


def scope_of(enabled: bool, calibrating: bool, recipe: Recipe | None, group: Any) -> Scope:
    """The scope of an autocast with these arguments, after checks."""
    check_group("fp8_autocast", "amax_reduction_group (fp8_group)", group)
    return Scope(enabled, calibrating, checked_recipe(recipe), group)


def flag_of(op: str, name: str, value: Any) -> bool:
    """See `checked_flag`. The error for a recipe says how to pass it."""
    recipe = ": pass a recipe by keyword, recipe=..." if isinstance(value, Recipe) else ""
    return checked_flag(op, name, value, recipe)


class autocast(ContextDecorator):
    """Run modules inside in FP8.

    Args:
        enabled: quantise the operands of GEMMs.
        calibrating: with `enabled=False`, run in high precision but record the amaxes of inputs and
            weights, so that their scales are ready at exit.
        recipe: None means `DelayedScaling()`.
        amax_reduction_group: process group over which amaxes are reduced; None is all ranks.

    Raises:
        ValueError: the recipe is not one of this package's.
        TypeError: `enabled` or `calibrating` is not a bool (or 0, 1 or None); the group is not a
            process group.

    >>> import torch
    >>> import transformer_engine.pytorch as te
    >>> layer = te.Linear(16, 16, device="cpu")
    >>> with te.autocast(recipe=DelayedScaling(amax_history_len=16)):
    ...     y = layer(torch.ones(16, 16))
    >>> y.shape
    torch.Size([16, 16])
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
    ) -> None:
        if {type(enabled), type(calibrating)} != {bool}:  # slower; each step makes an autocast
            op = type(self).__name__
            enabled = flag_of(op, "enabled", enabled)
            calibrating = flag_of(op, "calibrating", calibrating)
        self._scope = scope_of(enabled, calibrating, recipe, amax_reduction_group)

    def __enter__(self) -> None:
        enter(self._scope)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        leave(failed=kind is not None)


class fp8_autocast(autocast):
    """`autocast` under the keyword names of older versions.

    Args:
        enabled: see `autocast`.
        calibrating: see `autocast`.
        fp8_recipe: `recipe` of `autocast`.
        fp8_group: `amax_reduction_group` of `autocast`.
        recipe: the newer name of `fp8_recipe`.
        amax_reduction_group: the newer name of `fp8_group`.

    Raises:
        ValueError: an argument was passed under both of its names; also see `autocast`.
        TypeError: see `autocast`.

    >>> import torch
    >>> import transformer_engine.pytorch as te
    >>> from transformer_engine.common.recipe import Float8CurrentScaling
    >>> layer = te.Linear(16, 16, device="cpu")
    >>> with te.fp8_autocast(enabled=True, fp8_recipe=Float8CurrentScaling()):
    ...     y = layer(torch.ones(16, 16))
    >>> y.shape
    torch.Size([16, 16])
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        fp8_recipe: Recipe | None = None,
        fp8_group: Any = None,
        *,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
    ) -> None:
        op, group = "fp8_autocast", amax_reduction_group
        if fp8_recipe is not None:
            recipe = one_of(op, fp8_recipe=fp8_recipe, recipe=recipe)
        if fp8_group is not None:
            group = one_of(op, fp8_group=fp8_group, amax_reduction_group=group)
        super().__init__(enabled, calibrating, recipe, group)


def one_of(op: str, **spellings: Any) -> Any:
    """The argument that was given under one of its names, or None."""
    names = [name for name, value in spellings.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"[{op}] expected one of {' and '.join(names)}, got both")
    return spellings[names[0]] if names else None
