"""Recompute regions: parts of a model whose forward runs twice (activation checkpointing).

The first forward of a region records what every module did: under which scope, with which scales.
The second does the same, whatever has become of scope and scales meanwhile, and records nothing.

`te.checkpoint` enters its regions on the autocast stack. Those of `torch.utils.checkpoint`, and of
autograd functions written after its pattern, are found by what autograd tells: a region is kept
where autograd keeps the region's own record, and goes with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from transformer_engine.pytorch._torch_private import (
    checkpoint_of_hooks,
    functions_in_forward,
    graph_task,
    running_node,
    top_hooks,
)

if TYPE_CHECKING:
    from transformer_engine.pytorch.chain.plan import CallPlan
    from transformer_engine.pytorch.fp8.autocast_stack import Step
    from transformer_engine.pytorch.fp8.process_state import Scope

_KEY = "_te_region"


class Call(NamedTuple):
    """What a module did in the first forward.

    Attributes:
        scope: that was open.
        scales: fp32 `[3 * gemms]`, copied, under delayed scaling.
        step: that ends behind the module's backward, if any.
        plan: of the call, which knows how it went; None of attention, which has no chain.
    """

    scope: Scope
    scales: torch.Tensor | None
    step: Step | None
    plan: CallPlan | None = None


class RecomputeRegion:
    """The calls of one checkpointed region, by module and in order.

    Args:
        foreign: a region of a checkpoint that is not ours, found through autograd.
    """

    def __init__(self, foreign: bool = False) -> None:
        self.foreign = foreign
        self.owed: Step | None = None  # its last module has no gradients itself
        self._calls: dict[Any, list[Call]] = {}
        self._next: dict[Any, int] = {}
        self._task = -1

    def record_call(self, module: Any, call: Call) -> None:
        """Add a call of the first forward."""
        self._calls.setdefault(module, []).append(call)

    def has_calls_of(self, module: Any) -> bool:
        """Whether it has any call of a module."""
        return module in self._calls

    def restart(self) -> None:
        """The region is computed again, from its start."""
        self._next.clear()
        self.owed = None

    def next_call(self, module: Any) -> Call:
        """The call of the first forward that the module now recomputes.

        Raises:
            RuntimeError: the region calls the module more often than in the first forward.
        """
        task = graph_task()
        if self.foreign and task != self._task:  # nothing says when a foreign one starts
            self.restart()
        self._task = task
        index = self._next.get(module, 0)
        calls = self._calls[module]
        if index >= len(calls):
            raise RuntimeError(
                f"[checkpoint] expected {len(calls)} call(s) of layer {module.name} when the "
                "checkpointed function runs again, as in its first forward, got more"
            )
        self._next[module] = index + 1
        return calls[index]

    def finish(self) -> None:
        """The region has been computed again, to its end.

        Raises:
            RuntimeError: a module was called less often than in the first forward.
        """
        for module, calls in self._calls.items():
            done = self._next.get(module, 0)
            if done < len(calls):
                raise RuntimeError(
                    f"[checkpoint] expected {len(calls)} call(s) of layer {module.name} when the "
                    f"checkpointed function runs again, as in its first forward, got {done} (a "
                    "lambda over the variable of a loop calls the layer that the loop ended with)"
                )


class RecomputeContext(NamedTuple):
    """Which regions a call of a module belongs to.

    Attributes:
        recomputed: the region whose forward is computed again.
        open_regions: regions whose first forward is running.
        in_first_forward: it runs without autograd and will be computed again with it.
        separate_tensors: saved-tensor hooks need each tensor by itself, not slices of a buffer.
    """

    recomputed: RecomputeRegion | None
    open_regions: tuple[RecomputeRegion, ...]
    in_first_forward: bool
    separate_tensors: bool


def recompute_context(
    recomputed: RecomputeRegion | None, opened: tuple[RecomputeRegion, ...]
) -> RecomputeContext:
    """The recomputation state of this call.

    Args:
        recomputed: the region that was announced to be computed again.
        opened: that were announced.
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
        source = recomputes or running_node()
        recomputed = getattr(source, _KEY, None)
    hooks: Any = top_hooks(True)
    separate_tensors = hooks is not None and getattr(hooks[0], "separate_tensors", False)
    return RecomputeContext(recomputed, tuple(open_regions), bool(functions), separate_tensors)


def region_of(owner: Any) -> RecomputeRegion:
    """The region of one of autograd's records; made if there is none."""
    region: RecomputeRegion | None = getattr(owner, _KEY, None)
    if region is None:
        region = RecomputeRegion(foreign=True)
        setattr(owner, _KEY, region)
    return region


def attach_region(region: RecomputeRegion) -> None:
    """The innermost checkpoint that is running its first forward is this region's."""
    functions = () if torch.is_grad_enabled() else tuple(functions_in_forward())
    owner = functions[0] if functions else checkpoint_of_hooks()[0]
    if owner is not None:
        setattr(owner, _KEY, region)


def in_first_forward() -> bool:
    """Whether a forward runs without autograd that will run again with it."""
    return not torch.is_grad_enabled() and any(True for _ in functions_in_forward())
