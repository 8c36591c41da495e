"""Calls of modules in regions whose forward runs twice: see `regions.py`.

Both forwards run from tapes, or both by stages, so that autograd is given equal tensors to keep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from transformer_engine.pytorch.chain.stages.base import Parameters, Run, needs_of
from transformer_engine.pytorch.fp8.autocast import OUTSIDE, Scope, autocast_stack
from transformer_engine.pytorch.fp8.recipes.base import rules_of
from transformer_engine.pytorch.fp8.scaling_state import FORWARD
from transformer_engine.pytorch.recompute.regions import Call, Place, Region, graph_task, place

if TYPE_CHECKING:
    from transformer_engine.pytorch.fp8.scaled_module import ScaledModule
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


def begin_in_region(
    module: TransformerEngineBaseModule,
    x: torch.Tensor,
    parameters: Parameters,
    first_microbatch: bool | None,
) -> Run:
    """The run of a call that may be the first or the second of a region, or neither.

    Args:
        module: that is called.
        x: its input.
        parameters: of its chain.
        first_microbatch: what the caller said.

    Raises:
        RuntimeError: the call repeats one that cannot be found.
    """
    stack = autocast_stack()
    where = place(stack.repeated, stack.regions)
    needs: tuple[bool, ...] = ()
    if where.rehearses or torch.is_grad_enabled():
        needs = needs_of(where.rehearses or x.requires_grad, parameters)
    if graph_task() == -1 or not repeats(module, where.repeats):
        run = module.run_of(x, parameters, needs, first_microbatch, where.rehearses)
        return _noted(module, run, where, stack.scope)
    assert where.repeats is not None
    if not where.repeats.knows(module):  # it ran in high precision
        with stack.resumed(OUTSIDE):
            return module.run_of(x, parameters, needs, first_microbatch, where.rehearses)
    call = where.repeats.again(module)
    with stack.resumed(call.scope):
        run = module.run_of(x, parameters, needs, first_microbatch, where.rehearses)
    ends = ends_again(where.repeats, call, run.recording or run.rehearses)
    again = _again(module, run, call, ends and run.recording)
    for region in where.records:
        region.note(module, call._replace(ends_backward=ends, run=again))
    return again


def repeats(module: ScaledModule, region: Region | None) -> bool:
    """Whether a call within a backward repeats one of this region."""
    if module.in_foreign_region and (
        region is None or (region.foreign and not region.knows(module))
    ):
        raise RuntimeError(
            f"[{type(module).__name__}] expected to find the forward that runs again in this "
            "backward, got none: it ran in FP8 in a checkpoint that is not ours, of a kind that "
            "tells too little (torch.utils.checkpoint nested in itself does; then use "
            "transformer_engine.pytorch.checkpoint), or the function has called another layer "
            f"before, as a lambda over the variable of a loop does (layer {module.name})"
        )
    return region is not None


def first_call(module: ScaledModule, where: Place, counts: bool) -> Call:
    """What regions must know of a call that they see for the first time, but for its run.

    Args:
        module: that is called, in the scope that is open.
        where: the call happens.
        counts: autograd records it, now or when it is repeated.
    """
    stack = autocast_stack()
    scope = stack.scope
    ends = stack.first_pending and counts and module.updates(scope)
    if ends:
        stack.first_pending = False
    stack.noted = True
    if not where.records or any(region.foreign for region in where.records):
        module.in_foreign_region = True
    keeps_state = scope.enabled and rules_of(scope.recipe).keeps_state
    scales = module.scaling[FORWARD].scale.clone() if keeps_state and where.records else None
    return Call(scope, scales, ends)


def ends_again(region: Region, call: Call, counts: bool) -> bool:
    """Whether the backward of a call that repeats another one ends the step; `counts` as above."""
    ends = call.ends_backward or region.owes_end
    region.owes_end = ends and not counts
    return ends


def _noted(module: TransformerEngineBaseModule, run: Run, where: Place, scope: Scope) -> Run:
    """A first forward; the regions around it are told what it does."""
    if not (scope.enabled or scope.calibrating):
        return run
    call = first_call(module, where, run.recording or run.rehearses)
    result = run.once(call.ends_backward and run.recording)
    for region in where.records:
        region.note(module, call._replace(run=result))
    if where.apart:
        result.replays = None
    return result


def _again(module: TransformerEngineBaseModule, run: Run, call: Call, ends: bool) -> Run:
    """A run with the scales of the first time, from tapes if that was.

    Tapes know scales by their address, so those of each call are put into one place.
    """
    again = run.again
    if again is None:
        scales = None if call.scales is None else call.scales.clone()
        quantizers = [
            gemm.repeating(None if scales is None else scales[3 * i : 3 * i + 3])
            for i, gemm in enumerate(run.quantizers)
        ]
        again = Run(run.dtype, run.needs, quantizers, run.first_microbatch)
        again.recording, again.rehearses, again.repeats = run.recording, run.rehearses, True
        again.scales, again.kept = scales, run.kept
        run.again = module.chain.plan(again)
    elif call.scales is not None:
        assert again.scales is not None
        again.scales.copy_(call.scales)
    result = again.once(ends)
    assert call.run is not None
    if run.recording and call.run.recording and not call.run.replayed:
        result.replays = None
    return result
