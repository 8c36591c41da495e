"""Regions: parts of a model whose forward runs again in the backward (activation checkpointing).

The first forward of a region notes what every module did: under which scope, with which scales. The
second does the same again, whatever has become of scope and scales meanwhile, and leaves no trace.

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


class Region:
    """The calls of one region, by module and in order.

    Args:
        foreign: nobody has announced the region, it was found.
    """

    def __init__(self, foreign: bool = False) -> None:
        self.foreign = foreign
        self.owed: Step | None = None  # the module that was to end it has no gradients itself
        self._calls: dict[Any, list[Call]] = {}
        self._next: dict[Any, int] = {}
        self._task = -1

    def note(self, module: Any, call: Call) -> None:
        """Add a call of the first forward."""
        self._calls.setdefault(module, []).append(call)

    def knows(self, module: Any) -> bool:
        """Whether it has any call of a module."""
        return module in self._calls

    def restart(self) -> None:
        """The region is run again, from its start."""
        self._next.clear()
        self.owed = None

    def again(self, module: Any) -> Call:
        """The call of the first forward that the module now repeats.

        Raises:
            RuntimeError: the region calls the module more often than in the first forward.
        """
        task = graph_task()
        if self.foreign and task != self._task:  # nobody says when a found one starts
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
        """The region has been run again, to its end.

        Raises:
            RuntimeError: a module was called less often than in the first forward.
        """
        for module, calls in self._calls.items():
            repeated = self._next.get(module, 0)
            if repeated < len(calls):
                raise RuntimeError(
                    f"[checkpoint] expected {len(calls)} call(s) of layer {module.name} when the "
                    f"checkpointed function runs again, as in its first forward, got {repeated} (a "
                    "lambda over the variable of a loop calls the layer that the loop ended with)"
                )


class Place(NamedTuple):
    """Where a call of a module happens.

    Attributes:
        repeats: the region that is being run again.
        records: regions whose first forward is running.
        rehearses: that forward runs without autograd and will run again with it.
        apart: hooks that handle what is kept for the backward want each tensor by itself.
    """

    repeats: Region | None
    records: tuple[Region, ...]
    rehearses: bool
    apart: bool


def place(repeated: Region | None, opened: tuple[Region, ...]) -> Place:
    """Where we are.

    Args:
        repeated: that was announced to be run again.
        opened: that were announced.
    """
    records = list(opened)
    owner, recomputes = checkpoint_of_hooks()
    functions = () if torch.is_grad_enabled() else tuple(functions_in_forward())
    for one in (owner, *functions):
        if one is not None:
            region = region_of(one)
            if region not in records:
                records.append(region)
    if repeated is None and graph_task() != -1:
        source = recomputes or running_node()
        repeated = getattr(source, _KEY, None)
    hooks: Any = top_hooks(True)
    apart = hooks is not None and getattr(hooks[0], "tensors_apart", False)
    return Place(repeated, tuple(records), bool(functions), apart)


def region_of(owner: Any) -> Region:
    """The region of one of autograd's records; made if there is none."""
    region: Region | None = getattr(owner, _KEY, None)
    if region is None:
        region = Region(foreign=True)
        setattr(owner, _KEY, region)
    return region


def announce(region: Region) -> None:
    """The innermost checkpoint that is running its first forward is this region's."""
    functions = () if torch.is_grad_enabled() else tuple(functions_in_forward())
    owner = functions[0] if functions else checkpoint_of_hooks()[0]
    if owner is not None:
        setattr(owner, _KEY, region)


def rehearsing() -> bool:
    """Whether a forward runs without autograd that will run again with it."""
    return not torch.is_grad_enabled() and any(True for _ in functions_in_forward())
