"""The state that all threads share: scopes, scaling groups, GEMM counts, the debugger's session."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.fp8.counter import Counter
from transformer_engine.pytorch.fp8.recipes.base import rules_of
from transformer_engine.pytorch.fp8.scaling_state import BACKWARD, FORWARD, ScalingGroup


@dataclass(frozen=True)
class Scope:
    """The settings of one autocast.

    Attributes:
        number: equal scopes have one number.
        key: scopes of equal recipe and group have one key; -1 where the recipe keeps no state.
    """

    enabled: bool = False
    calibrating: bool = False
    recipe: Recipe | None = None
    group: Hashable = None
    number: int = field(default=0, compare=False)
    key: int = field(default=-1, compare=False)

    @property
    def active(self) -> bool:
        """Whether calls in it are in FP8 or calibrate."""
        return self.enabled or self.calibrating

    def leaves_amaxes(self, counts: bool) -> bool:
        """Whether a call in it leaves amaxes; `counts`: gradients are on, now or in a recompute."""
        return counts if self.enabled else self.calibrating


OUTSIDE = Scope()
_MOST_SCOPES = 4096  # scopes that are known by number


class ProcessState:
    """The state that all threads of a process share.

    Attributes:
        scopes: the scopes that were entered, by value.
        compiled_groups: scaling groups of modules in compiled code, by (recipe, process group). A
            graph does not tell which modules ran, so an update covers the whole group.
        forward_pending: compiled code has deferred the forward update.
        backward_pending: compiled code has deferred the backward update.
        has_regions: a recompute region has recorded a call in FP8.
        checkpoints: the regions of checkpoints in which `activation_recompute_forward` was opened,
            oldest first. Keys are the objects that autograd keeps for these checkpoints.
        announced: subjects of warnings that were given; see `notices`.
        compiled_in_fp8: layers, see `compiled_scales`.
        gemms: GEMMs that ran, by layer, GEMM and kind.
        sent: collectives of layers, see `chain.parallel_report`.
        user_buffers: what `initialize_ub` has set, see `chain.user_buffers`.
        captures_graphs: a trainer captures CUDA graphs, see `cuda_graphs.saved_scaling`.
        rng_trackers: trackers that have had states, see `rng`.
        inspector: the inspector of the debugger's session, see transformer_engine/debug.
    """

    def __init__(self) -> None:
        self.scopes = {OUTSIDE: OUTSIDE}
        self._keys: dict[tuple[Any, Hashable], int] = {}
        self._numbers = itertools.count(1)
        self._groups: weakref.WeakValueDictionary[int, ScalingGroup] = weakref.WeakValueDictionary()
        self.compiled_groups: dict[tuple[Any, Hashable], ScalingGroup] = {}
        self.forward_pending = self.backward_pending = False
        self.has_regions = False
        self.checkpoints: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.announced: set[str] = set()
        self.compiled_in_fp8: set[tuple[str, Any]] = set()
        self.gemms, self.sent = Counter(), Counter()
        self.user_buffers: Any = None
        self.captures_graphs = False
        self.rng_trackers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.inspector: Any = None

    def intern(self, scope: Scope) -> Scope:
        """The first scope made that equals this one, so that scopes compare by their number."""
        known = self.scopes.get(scope)  # only once: the hash reads every field of the recipe
        if known is None:
            if len(self.scopes) >= _MOST_SCOPES:  # a program may make a recipe in every step
                self.scopes, self._keys = {OUTSIDE: OUTSIDE}, {}
            key = -1
            if rules_of(scope.recipe).keeps_state:
                key = self._keys.setdefault((scope.recipe, scope.group), next(self._numbers))
            new = replace(scope, number=next(self._numbers), key=key)
            known = self.scopes.setdefault(new, new)
        return known

    def new_group(self, recipe: Any, process_group: Any) -> ScalingGroup:
        """A scaling group without states."""
        group = ScalingGroup(recipe, process_group)
        self._groups[next(self._numbers)] = group
        return group

    def compiled_group(self, recipe: Any, process_group: Hashable) -> ScalingGroup:
        """The scaling group that compiled code uses under a recipe; made at first use."""
        key = (recipe, process_group)
        group = self.compiled_groups.get(key)
        if group is None:
            number = 1 + len(self.compiled_groups)
            # Take the object that scopes hold: comparing an object with itself is fast.
            recipe = next((known for known, _ in self._keys if known == recipe), recipe)
            group = ScalingGroup(recipe, process_group, number)
            self.compiled_groups[key] = group
        return group

    def join_compiled(self, scope: Scope, states: Iterable[Any]) -> None:
        """Move states to the group of compiled code under the recipe of a scope."""
        self.flush()  # pending updates follow the rules of the groups being left
        group = self.compiled_group(scope.recipe, scope.group)
        for state in states:
            if not state.scale.is_meta:
                group.add(state)

    def update(self, direction: str) -> None:
        """Update the scales of all modules in one direction, oldest group first."""
        for group in [*self._groups.values(), *self.compiled_groups.values()]:
            group.update(direction)

    def flush(self) -> None:
        """Run the updates that compiled code has deferred."""
        if self.forward_pending:
            self._update_compiled(FORWARD)
        if self.backward_pending:
            self._update_compiled(BACKWARD)
        self.forward_pending = self.backward_pending = False

    def _update_compiled(self, direction: str) -> None:
        for group in self.compiled_groups.values():
            group.update(direction)


_STATE = ProcessState()


def process_state() -> ProcessState:
    """What all threads of the process share."""
    return _STATE


def reset_process_state() -> None:
    """Forget scopes, groups and counts; keep the debugger's session, trackers and user buffers.

    Numbers are not used again: plans of modules have those of the scopes in which they ran.
    """
    _STATE.gemms.reset()
    _STATE.sent.reset()
    stays = ("_numbers", "gemms", "inspector", "rng_trackers", "sent", "user_buffers")
    shared = {name: getattr(_STATE, name) for name in stays}
    _STATE.__init__()  # type: ignore[misc]
    vars(_STATE).update(shared)
