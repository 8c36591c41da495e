"""Calls of modules in recompute regions, whose forward runs twice: see `fp8/recompute_regions.py`.

Each segment runs from a recording in both forwards, or stage by stage in both, so that autograd
saves the same tensors. What only one of the forwards prepares, such as a new scaling state, is not
seen by modes: a selective checkpoint takes the n-th operation of a kind in the recompute for the
n-th in the first forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from transformer_engine import _C
from transformer_engine.pytorch._torch_private import (
    dispatch_modes,
    fake_mode,
    graph_task,
    without_modes,
)
from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.chain.main_grad_uses import mark_forward
from transformer_engine.pytorch.chain.node import call_chain
from transformer_engine.pytorch.chain.plan import CallPlan, needs_of
from transformer_engine.pytorch.chain.stage import Parameters
from transformer_engine.pytorch.fp8.autocast_stack import Step, autocast_stack
from transformer_engine.pytorch.fp8.process_state import OUTSIDE, Scope, process_state
from transformer_engine.pytorch.fp8.recipes.base import rules_of
from transformer_engine.pytorch.fp8.recompute_regions import (
    Call,
    RecomputeContext,
    RecomputeRegion,
    recompute_context,
)
from transformer_engine.pytorch.fp8.scaling_state import FORWARD

if TYPE_CHECKING:
    from transformer_engine.pytorch.fp8.scaled_module import ScaledModule
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

Made = TypeVar("Made")


def call_in_region(
    module: TransformerEngineBaseModule,
    chain: Chain,
    values: Sequence[torch.Tensor],
    parameters: Parameters,
    first_microbatch: bool | None,
) -> tuple[CallPlan, Any]:
    """Run a call that may be in a recompute region: first forward, recompute, or neither.

    Returns:
        The plan of the call, and what the chain returns.

    Raises:
        RuntimeError: the call is a recompute, and its first forward cannot be found.
    """
    plan, step = _plan_in_region(module, chain, values, parameters, first_microbatch)
    with _cached_weights(plan) if plan.caching else _nothing:
        return plan, call_chain(plan, step, *values, *parameters)


_nothing = nullcontext()


def _unseen_by_modes() -> AbstractContextManager[Any]:
    """A context in which modes see no operations, unless one of them makes all tensors fake."""
    hides = dispatch_modes() > 0 and fake_mode() is None
    return without_modes() if hides else _nothing


@contextmanager
def _cached_weights(plan: CallPlan) -> Iterator[None]:
    """Let a recompute read the weights of its first forward, whatever was cached since."""
    stages = [stage for stage, _ in plan.caching]
    before = [stage.cached_weight for stage in stages]
    if not plan.is_recompute:
        yield
        plan.cached = {stage: stage.cached_weight for stage in stages}
        return
    for stage in stages:
        stage.cached_weight = plan.cached.get(stage, stage.cached_weight)
    try:
        yield
    finally:
        for stage, other in zip(stages, before, strict=True):
            stage.cached_weight = other


def _plan_in_region(
    module: TransformerEngineBaseModule,
    chain: Chain,
    values: Sequence[torch.Tensor],
    parameters: Parameters,
    first_microbatch: bool | None,
) -> tuple[CallPlan, Step | None]:
    """The plan of the call, and the autocast step that ends with its backward, or None."""
    stack = autocast_stack()
    where = recompute_context(stack.recomputed, stack.regions)
    needs: tuple[bool, ...] = ()
    if where.in_first_forward and first_microbatch is True:
        _mark_weights(module, parameters, where)
    if where.in_first_forward or torch.is_grad_enabled():
        needs = needs_of((*values, *parameters))
        if where.in_first_forward:
            needs = (*[True] * len(values), *needs[len(values) :])
    facts = chain, values[0], parameters, needs, first_microbatch
    if graph_task() == -1 or not is_recompute(module, where.recomputed):
        with _unseen_by_modes():
            plan = module.plan_for(*facts, autocast_stack(), where.in_first_forward)
            return _first_plan(module, plan, where, stack.scope)
    assert where.recomputed is not None
    call = where.recomputed.next_call(module)
    with stack.resumed(call.scope), _unseen_by_modes():
        plan = module.plan_for(*facts, autocast_stack(), where.in_first_forward)
    if not call.scope.active:
        where.record_call(module, call)
        if plan.joins is not call.joins:
            plan = plan.copy()
            plan.joins = call.joins
        return plan, None
    ends = plan.requires_grad or plan.in_first_forward
    step = recompute_step(where.recomputed, call, ends)
    recompute_plan = _recompute_plan(module, plan, call)
    where.record_call(module, call._replace(step=step, plan=recompute_plan))
    return recompute_plan, step if plan.requires_grad else None


def _mark_weights(
    module: TransformerEngineBaseModule, parameters: Parameters, where: RecomputeContext
) -> None:
    """Mark a first forward without autograd; its recompute leaves no mark of its own."""
    inputs = module.chain.inputs
    for step in module.chain.steps:
        fuses = getattr(step.stage, "fuse_wgrad", False)
        weight = parameters[step.parameters.start - inputs] if fuses else None
        if weight is not None and weight.requires_grad:
            mark = mark_forward(weight, bool(getattr(weight, "overwrite_main_grad", False)))
            for region in where.open_regions:
                region.marks.append(mark)


def is_recompute(module: ScaledModule, region: RecomputeRegion | None) -> bool:
    """Whether a call within a backward is the recompute of a call of this region."""
    if module.in_foreign_region and (
        region is None or (region.foreign and not region.has_calls_of(module))
    ):
        raise RuntimeError(
            f"[{type(module).__name__}] expected to find the first forward of a layer that a "
            "checkpoint recomputes in this backward, got none: use "
            "transformer_engine.pytorch.checkpoint instead of a checkpoint that does not show its "
            "first forward to autograd (such as torch.utils.checkpoint nested in itself), and call "
            "the same layer both times (a lambda that captures the variable of a loop does not) "
            f"(layer {module.name})"
        )
    return region is not None and region.has_calls_of(module)


def record_first_call(module: ScaledModule, where: RecomputeContext, ends: bool) -> Call:
    """Make the record of a first forward in the regions `where`, without its plan.

    `ends` says whether the call has a backward, because autograd records it now or in the
    recompute.
    """
    stack = autocast_stack()
    scope = stack.scope
    step = module.take_backward_end() if ends else None
    process_state().has_regions = True
    # A call in a backward that is no recompute, as from a hook, needs no region.
    unseen = graph_task() == -1 and not where.open_regions
    if unseen or any(region.foreign for region in where.open_regions):
        module.in_foreign_region = True
    keeps_state = scope.enabled and rules_of(scope.recipe).keeps_state
    scales = module.scaling[FORWARD].scale.clone() if keeps_state and where.open_regions else None
    return Call(scope, scales, step)


def made_in_region(
    module: ScaledModule,
    recording: bool,
    casts: Callable[[Scope], bool],
    make: Callable[[bool, Call | None], Made],
) -> tuple[Made, Step | None] | None:
    """Call `make` for a call that may be the first forward or the recompute of a region.

    `recording` says whether autograd records the call, `casts` whether a call in a scope casts to
    FP8. `make` gets whether gradients are on, now or in the recompute, and the record of the first
    forward if this is a recompute, else None.

    Returns:
        The result of `make`, and the step that ends with the backward of the call; None in high
        precision.
    """
    stack = autocast_stack()
    where = recompute_context(stack.recomputed, stack.regions)
    counts = torch.is_grad_enabled() or where.in_first_forward
    ends = recording or where.in_first_forward
    region = where.recomputed
    again = graph_task() != -1 and is_recompute(module, region)
    first = region.next_call(module) if again and region is not None else None
    scope = stack.scope if first is None else first.scope
    if not casts(scope):
        where.record_call(module, Call(OUTSIDE))
        return None
    if first is None:
        with _unseen_by_modes():
            made = make(counts, None)
            call = record_first_call(module, where, ends)
    else:
        assert region is not None
        with stack.resumed(scope), _unseen_by_modes():
            made = make(counts, first)
        call = first._replace(step=recompute_step(region, first, ends))
    where.record_call(module, call)
    return made, call.step if recording else None


def recompute_step(region: RecomputeRegion, call: Call, ends: bool) -> Step | None:
    """The autocast step that ends with the backward of a recompute; see `record_first_call`."""
    step = call.step or region.owed
    region.owed = None if ends else step
    return step


def _first_plan(
    module: TransformerEngineBaseModule, plan: CallPlan, where: RecomputeContext, scope: Scope
) -> tuple[CallPlan, Step | None]:
    """The plan of a first forward; the regions around it record the call."""
    if not scope.active:
        where.record_call(module, Call(scope, joins=plan.joins))
        return plan, None
    call = record_first_call(module, where, plan.requires_grad or plan.in_first_forward)
    result = plan.copy()
    where.record_call(module, call._replace(plan=result, joins=plan.joins))
    if where.separate_tensors:
        result.recordings = None
    return result, call.step if plan.requires_grad else None


@without_modes()  # a selective checkpoint would not find these operations in the first forward
def _new_recompute_plan(
    module: TransformerEngineBaseModule, plan: CallPlan, call: Call
) -> CallPlan:
    scales = None if call.scales is None else call.scales.clone()
    quantizers = [
        gemm.for_recompute(None if scales is None else scales[3 * i : 3 * i + 3])
        for i, gemm in enumerate(plan.quantizers)
    ]
    recompute = plan.with_quantizers(quantizers)
    recompute.is_recompute, recompute.recompute_scales = True, scales
    return plan.chain.prepare(recompute)


def _recompute_plan(module: TransformerEngineBaseModule, plan: CallPlan, call: Call) -> CallPlan:
    """The plan of a recompute, with the scales of the first forward.

    A recording holds the addresses of scales, so the scales of each call are copied to the same
    memory. Segments run from recordings only if they did in the first forward.
    """
    recompute = plan.recompute_plan
    if recompute is None:
        recompute = plan.recompute_plan = _new_recompute_plan(module, plan, call)
    elif call.scales is not None:
        assert recompute.recompute_scales is not None
        # Not by an operation of torch, which a selective checkpoint would not find in the first
        # forward.
        _C.copy(call.scales, recompute.recompute_scales)
    result = recompute.copy()
    assert call.plan is not None
    result.cached, result.joins = call.plan.cached, call.joins
    if plan.requires_grad is call.plan.requires_grad:
        if call.plan.unrecorded is None or call.plan.recordings is None:
            result.recordings = None
        else:
            result.by_stages = call.plan.unrecorded
            result.recordings = call.plan.recordings.of_recompute(call.plan.admitted)
    return result
