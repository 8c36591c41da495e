"""`fp8_autocast`: the stack of scopes that decides how modules quantise.

A `Scope` is frozen; entering an autocast pushes one, leaving it pops it. Modules look at the top of
the stack in forward; backward uses what forward recorded. Leaving the outermost scope updates the
scales of forward tensors; the first module of that scope updates those of gradients at the end of
its backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import torch

from transformer_engine.common.recipe import DelayedScaling, Recipe
from transformer_engine.pytorch.fp8.recipes.base import find_rules, recipe_names, rules_of
from transformer_engine.pytorch.fp8.scaling_state import (
    BACKWARD,
    FORWARD,
    ScalingMembers,
    ScalingRegistry,
)
from transformer_engine.pytorch.parallel.groups import check_group
from transformer_engine.pytorch.recompute.regions import Region, graph_task, rehearsing


@dataclass(frozen=True)
class Scope:
    """What one autocast region asks for."""

    enabled: bool = False
    calibrating: bool = False
    recipe: Recipe | None = None
    group: Hashable = None
    number: int = field(default=0, compare=False)  # equal scopes have one number


OUTSIDE = Scope()
_NUMBERS = itertools.count(1)


GemmGroup = tuple[tuple[tuple[str, str, str], int], ...]  # GEMMs and how many of each


class AutocastStack:
    """The scopes entered so far, the registry of scaling states, and the count of GEMMs."""

    def __init__(self) -> None:
        self.scope = OUTSIDE
        self.members: dict[str, ScalingMembers] = {}  # of the scope's recipe, by direction
        self.outer: list[tuple[Scope, dict[str, ScalingMembers]]] = []
        self.first_pending = False  # no module was recorded in the outermost scope so far
        self.forward_pending = self.backward_pending = False
        self.unsettled = False  # the outermost scope was entered in compiled code
        self.runs_again = False  # code is being compiled that its graph will compute again
        self.repeats = False  # the outermost scope was entered in a backward
        self.regions: tuple[Region, ...] = ()  # whose first forward is running, outermost first
        self.repeated: Region | None = None  # that is being run again
        self.noted = False  # some region has calls
        self.registry = ScalingRegistry()
        self.known: dict[Scope, Scope] = {}
        self.model_inits: list[Any] = []  # scopes of quantized_model_init, see model_init.py
        self.announced: set[str] = set()  # what is reported once, however many modules it concerns
        self.compiled_in_fp8: set[tuple[str, Any]] = set()  # layers, see kernels/repetition.py
        self.gemm_counts: dict[tuple[str, str, str], int] = {}
        self.gemm_groups: dict[GemmGroup, int] = {}  # how often each group ran as a whole
        self.inspector: Any = None  # of the debugger's session, see transformer_engine/debug
        self.exporting = False  # within an enabled `onnx_export`

    def intern(self, scope: Scope) -> Scope:
        """The first scope made that equals this one, so that scopes compare by their number."""
        known = self.known.get(scope)  # once: a hash looks at every field of the recipe
        if known is None:
            known = self.known[scope] = replace(scope, number=next(_NUMBERS))
        return known

    def push(self, scope: Scope) -> None:
        """Enter a scope."""
        if not self.outer:
            self.unsettled = torch.compiler.is_compiling()
            self.repeats = not self.unsettled and graph_task() != -1
            self.first_pending = not self.repeats
            if not (self.unsettled or self.repeats):
                self.flush()
        self._enter(scope)

    def _enter(self, scope: Scope) -> None:
        self.outer.append((self.scope, self.members))
        self.scope, self.members = scope, {}
        if scope.recipe is not None and rules_of(scope.recipe).keeps_state:
            for direction in (FORWARD, BACKWARD):
                self.members[direction] = self.registry.members(
                    scope.recipe, scope.group, direction
                )

    def pop(self) -> None:
        """Leave it; at the outermost level, end the forward step."""
        left = self.scope
        self.scope, self.members = self.outer.pop()
        if self.outer:
            return
        self.first_pending = self.unsettled = False
        if self.repeats:
            return
        compiling = torch.compiler.is_compiling()
        recorded = torch.is_grad_enabled() or (not compiling and rehearsing())
        if left.calibrating or (left.enabled and recorded):
            if compiling:
                self.forward_pending = True
            else:
                self.registry.update(FORWARD)

    @contextmanager
    def resumed(self, scope: Scope) -> Iterator[None]:
        """Inside, a scope that has ended is open again. It starts and ends no step."""
        pending, self.first_pending = self.first_pending, False
        self._enter(scope)
        try:
            yield
        finally:
            self.scope, self.members = self.outer.pop()
            self.first_pending = pending

    def end_backward(self) -> None:
        """End the backward step."""
        self.registry.update(BACKWARD)

    def defer_end_backward(self) -> None:
        """End the backward step before the next one starts.

        A compiled backward writes its amaxes back when it ends, so nothing inside it can.
        """
        self.backward_pending = True

    def flush(self) -> None:
        """Do what was deferred."""
        if self.forward_pending:
            self.forward_pending = False
            self.registry.update(FORWARD)
        if self.backward_pending:
            self.backward_pending = False
            self.end_backward()

    def reset(self) -> None:
        """Forget every scope and registration (tests, notebooks); the debugger's session stays."""
        inspector = self.inspector
        self.__init__()  # type: ignore[misc]
        self.inspector = inspector


_STACK = AutocastStack()


def autocast_stack() -> AutocastStack:
    """The one stack of this process."""
    return _STACK


_DEFAULT_RECIPE = DelayedScaling()


def get_default_recipe() -> Recipe:
    """The recipe of an autocast that names none: delayed scaling with its defaults.

    >>> get_default_recipe() == DelayedScaling()
    True
    """
    return _DEFAULT_RECIPE


def checked_recipe(recipe: Recipe | None) -> Recipe:
    """The recipe of an autocast that was given this one."""
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
    """What these arguments of an autocast ask for, checked."""
    check_group("fp8_autocast", "amax_reduction_group (fp8_group)", group)
    return Scope(enabled, calibrating, checked_recipe(recipe), group)


class autocast(ContextDecorator):
    """Run modules inside in FP8.

    Args:
        enabled: quantise the operands of GEMMs.
        calibrating: with `enabled=False`, run in high precision but note the amaxes of inputs and
            weights, so that their scales are ready at exit.
        recipe: `DelayedScaling()` where None.
        amax_reduction_group: process group over which amaxes are reduced; None is all ranks.

    Raises:
        ValueError: the recipe is not one of this package's.
        TypeError: a recipe in the place of a flag; a group that is none.

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
        flags: dict[str, Any] = {"enabled": enabled, "calibrating": calibrating}
        for flag, value in flags.items():
            if isinstance(value, Recipe):
                raise TypeError(
                    f"[{type(self).__name__}] expected {flag} to be True or False, got {value!r}: "
                    "pass a recipe by keyword, recipe=..."
                )
        self._scope = scope_of(enabled, calibrating, recipe, amax_reduction_group)

    def __enter__(self) -> None:
        # Compiled code asks no scope for its number, and cannot make new ones known.
        compiling = torch.compiler.is_compiling()
        _STACK.push(self._scope if compiling else _STACK.intern(self._scope))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _STACK.pop()


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
        ValueError: an argument under both of its names; what `autocast` refuses.
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
    given = [name for name, value in spellings.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"[{op}] expected one of {' and '.join(given)}, got both")
    return spellings[given[0]] if given else None
