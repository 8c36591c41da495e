"""Recompute regions: parts of a model whose forward runs twice (activation checkpointing).

The first forward of a region records the autocast scope and the scales of every module call. The
recompute uses them again, even if scope and scales have changed meanwhile, and records no amaxes.

`te.checkpoint` enters its regions on the autocast stack. Regions of `torch.utils.checkpoint`, and
of functions written after its pattern, as DeepSpeed's, are found through autograd: the region is an
attribute of the object that autograd keeps for the checkpoint, and lives as long.

A checkpoint may run again before its own backward, from a hook on a tensor: autograd does not show
which one it is. Then it must open `activation_recompute_forward` in both forwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from transformer_engine.pytorch._torch_private import (
    checkpoint_of_hooks,
    forward_grad_enabled,
    functions_in_forward,
    graph_task,
    node_will_run,
    running_node,
    top_hooks,
)
from transformer_engine.pytorch.fp8.process_state import OUTSIDE, process_state

if TYPE_CHECKING:
    from transformer_engine.pytorch.chain.plan import CallPlan
    from transformer_engine.pytorch.fp8.autocast_stack import AutocastStack, Step
    from transformer_engine.pytorch.fp8.process_state import Scope

_KEY = "_te_region"


class Call(NamedTuple):
    """A call of a module in the first forward.

    Attributes:
        scope: the autocast scope of the call.
        scales: under delayed scaling a copy of the scales, fp32 `[3 * gemms]`; else None.
        step: the autocast step that ends with the module's backward, or None.
        plan: the plan of the call; None in high precision, and for attention, which makes none.
        joins: `CallPlan.joins` of the call.
    """

    scope: Scope
    scales: torch.Tensor | None = None
    step: Step | None = None
    plan: CallPlan | None = None
    joins: bool = True


def _any_active(calls: Iterable[Call]) -> bool:
    return any(call.scope.active for call in calls)


class RecomputeRegion:
    """The calls of one checkpointed region, by module and in order.

    Args:
        foreign: a region of a checkpoint that is not ours, found through autograd.

    Attributes:
        marks: marks of weights, see `main_grad_uses`, which live as long as the region.
    """

    def __init__(self, foreign: bool = False) -> None:
        self.foreign = foreign
        self.marks: list[Any] = []
        self.owed: Step | None = None  # for the next call to end: the last one has no backward
        self._calls: dict[Any, list[Call]] = {}
        self._next: dict[Any, int] = {}
        self._task = -1

    def record_call(self, module: Any, call: Call) -> None:
        """Add a call of the first forward."""
        self._calls.setdefault(module, []).append(call)

    def has_calls_of(self, module: Any) -> bool:
        """Whether it has any call of a module."""
        return module in self._calls

    def has_calls_left(self, module: Any) -> bool:
        """Whether a call of a module has not been recomputed yet in the backward that runs."""
        done = 0 if self.foreign and graph_task() != self._task else self._next.get(module, 0)
        return done < len(self._calls.get(module, ()))

    def restart(self) -> None:
        """Begin a recompute of the region."""
        self._next.clear()
        self.owed = None

    def next_call(self, module: Any) -> Call:
        """The call of the first forward that the module now recomputes.

        Layers that ran only in high precision may be called any number of times.

        Raises:
            RuntimeError: the region calls the module more often than in the first forward.
        """
        task = graph_task()
        if self.foreign and task != self._task:
            self.restart()
        self._task = task
        index = self._next.get(module, 0)
        calls = self._calls.get(module, [])
        if index >= len(calls):
            if not _any_active(calls):
                return Call(OUTSIDE)
            raise RuntimeError(
                f"[checkpoint] expected {len(calls)} call(s) of layer {module.name} when the "
                "checkpointed function runs again, as in its first forward, got more"
            )
        self._next[module] = index + 1
        return calls[index]

    def finish(self) -> None:
        """End a recompute of the region.

        Raises:
            RuntimeError: a module was called less often than in the first forward.
        """
        for module, calls in self._calls.items():
            done = self._next.get(module, 0)
            if done < len(calls) and _any_active(calls):
                raise RuntimeError(
                    f"[checkpoint] expected {len(calls)} call(s) of layer {module.name} when the "
                    f"checkpointed function runs again, as in its first forward, got {done} (a "
                    "lambda over the variable of a loop calls the layer that the loop ended with)"
                )


class UnknownRegion(RecomputeRegion):
    """Stands for the most probable of several regions with a call left of the layer that runs."""

    def __init__(self, regions: Iterable[RecomputeRegion]) -> None:
        super().__init__(foreign=True)
        self._regions = tuple(regions)
        self._own: RecomputeRegion | None = None

    def has_calls_of(self, module: Any) -> bool:
        """Whether it has any call of a module; chooses the region."""
        if self._own is None:
            self._own = next((one for one in self._regions if one.has_calls_left(module)), None)
        return self._own is not None and self._own.has_calls_of(module)

    def next_call(self, module: Any) -> Call:
        """The call of the first forward that the module now recomputes."""
        own = self._own if self.has_calls_of(module) else None
        return Call(OUTSIDE) if own is None else own.next_call(module)


class RecomputeContext(NamedTuple):
    """Which regions a call of a module belongs to.

    Attributes:
        recomputed: the region that is being recomputed, or None.
        open_regions: the regions whose first forward is running.
        in_first_forward: the call runs without autograd; its recompute will run with autograd.
        separate_tensors: saved-tensor hooks need separate tensors, not slices of a buffer.
    """

    recomputed: RecomputeRegion | None
    open_regions: tuple[RecomputeRegion, ...]
    in_first_forward: bool
    separate_tensors: bool

    def record_call(self, module: Any, call: Call) -> None:
        """Add a call of the first forward to the regions that it is in."""
        for region in self.open_regions:
            region.record_call(module, call)


def recompute_context(
    recomputed: RecomputeRegion | None, opened: tuple[RecomputeRegion, ...]
) -> RecomputeContext:
    """The regions of this call, and how it takes part in them.

    Args:
        recomputed: the region of `te.checkpoint` that is being recomputed, or None.
        opened: the regions of `te.checkpoint` whose first forward is running.
    """
    open_regions = list(opened)
    owner, recomputes = checkpoint_of_hooks()
    functions = () if torch.is_grad_enabled() else tuple(functions_in_forward())
    for one in (owner, *functions):
        if one is not None:
            region = region_of(one)
            if region not in open_regions:
                open_regions.append(region)
    if recomputed is None and graph_task() != -1:
        source = running_node() if recomputes is None else recomputes
        recomputed = getattr(source, _KEY, None)
        if recomputed is not None and not recomputed.foreign:
            recomputed = None  # its node runs, but `te.checkpoint` says when its function does
    hooks: Any = top_hooks(True)
    separate_tensors = hooks is not None and getattr(hooks[0], "separate_tensors", False)
    return RecomputeContext(recomputed, tuple(open_regions), bool(functions), separate_tensors)


def region_of(owner: Any) -> RecomputeRegion:
    """The region of an object that autograd keeps for a checkpoint; made at the first call."""
    region: RecomputeRegion | None = getattr(owner, _KEY, None)
    if region is None:
        region = RecomputeRegion(foreign=True)
        setattr(owner, _KEY, region)
    return region


def announce_checkpoint() -> None:
    """Let the checkpoint whose first forward is running be found when it runs again."""
    owner = next(functions_in_forward(), None)
    if owner is not None:
        process_state().checkpoints[owner] = region_of(owner)


def announced_region() -> RecomputeRegion | None:
    """The region of an announced checkpoint that runs again now; None if there is none.

    Candidates are the checkpoints whose nodes the running backward will still reach. Autograd
    reaches the newest of them first.
    """
    if graph_task() == -1:
        return None
    checkpoints = [*process_state().checkpoints.items()]
    regions = (region for owner, region in reversed(checkpoints) if node_will_run(owner))
    running = getattr(running_node(), _KEY, None)  # a checkpoint that runs in its own backward
    first = next(regions, None) if running is None else running
    return None if first is None else UnknownRegion(chain([first], regions))


def attach_region(region: RecomputeRegion) -> None:
    """Attach a region to the innermost checkpoint whose first forward is running."""
    functions = () if torch.is_grad_enabled() else tuple(functions_in_forward())
    owner = functions[0] if functions else checkpoint_of_hooks()[0]
    if owner is not None:
        setattr(owner, _KEY, region)


def in_first_forward() -> bool:
    """Whether this is a first forward without autograd, whose recompute will run with autograd."""
    return not torch.is_grad_enabled() and any(True for _ in functions_in_forward())


def may_recompute(stack: AutocastStack) -> bool:
    """Whether a call may be in a recompute region: in its first forward or in its recompute.

    This also holds for calls in high precision: the layer may have FP8 calls in the same backward.
    """
    if top_hooks(True) is not None:
        return True
    # Gradients are also off in inference mode, where only our own regions record calls.
    if not forward_grad_enabled() and (stack.regions or not torch.is_inference_mode_enabled()):
        return True
    return (process_state().has_regions or stack.scope.active) and graph_task() != -1
