"""Calls of a chain: segments that were recorded run by one call of `_C`, the others by stages.

A chain is cut into segments at the first call with its shapes. Values that pass from one segment
to the next are tensors of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch

from transformer_engine.pytorch.chain.chain import (
    Targets,
    add_grads,
    run_backward,
    run_forward,
)
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.recording import Tensors
from transformer_engine.pytorch.chain.segment import Segment, Trace, traced
from transformer_engine.pytorch.chain.stages.base import Saved

# Up to this many bytes of input the host takes longer than the GPU. Beyond, kernels take longer,
# and stages need less memory: each allocates its own, and frees it when it is done.
HOST_BOUND_BYTES = 16 * 1024 * 1024
_MOST_SHAPES = 32  # that are recorded for one plan


def forward(
    plan: CallPlan, inputs: tuple[Any, ...], state: Tensors = ()
) -> tuple[Sequence[Any], Sequence[torch.Tensor | None], Sequence[Trace]]:
    """Run the forward of a plan.

    Args:
        plan: of the call.
        inputs: the values that come in, and the parameters.
        state: what stands in place of the stand-ins of the plan, if it has any.

    Returns:
        What the chain returns, the tensors to save for the backward, and the traces of the call.
    """
    found = _segments_of(plan, inputs)
    if len(found) == 1:
        results, saved, trace = found[0].forward(plan, inputs, state)
        plan.recorded = trace.stages is None
        return results, saved, (trace,)
    chain = plan.chain
    values = [*inputs, *chain.results]
    if not found:
        trace, tensors = traced(None, run_forward(plan.bound(state), values, 0, len(chain.steps)))
        if not plan.compiling:  # a change of what was made outside lets Dynamo return every tensor
            plan.recorded = False
        return [values[v] for v in chain.outputs], tensors, (trace,)
    tensors, traces = [], []
    for segment in found:
        results, saved, trace = segment.forward(plan, segment.read_inputs(values), state)
        for v in segment.last_reads:
            values[v] = None
        for v, result in zip(segment.makes, results, strict=True):
            values[v] = result
        traces.append(trace)
        tensors += saved
    plan.recorded = False
    return [values[v] for v in chain.outputs], tensors, traces


def backward(
    plan: CallPlan,
    grad_outputs: Sequence[torch.Tensor | None],
    tensors: list[torch.Tensor | None],
    traces: Sequence[Trace],
    targets: Targets,
    state: Tensors = (),
) -> list[torch.Tensor | None]:
    """Gradients of the values that came in and of the parameters.

    Args:
        plan: of the forward.
        grad_outputs: of what the chain returned, contiguous.
        tensors: that were saved. The list is emptied, so that memory is free as soon as possible.
        traces: of the forward.
        targets: of weight gradients.
        state: of the forward.
    """
    chain = plan.chain
    if len(traces) == 1 and traces[0].stages is None:
        assert traces[0].segment is not None
        grads = traces[0].segment.backward(plan, grad_outputs, tensors, targets, state)
    else:
        grads = [None] * len(chain.names)
        for v, grad in zip(chain.outputs, grad_outputs, strict=True):
            grads[v] = add_grads(grads[v], grad)
        for trace in reversed(traces):
            own = tensors[len(tensors) - trace.tensors :]
            del tensors[len(tensors) - trace.tensors :]
            _run_backward(plan, grads, own, trace, targets, state)
    if False not in plan.needs:
        return grads[: len(plan.needs)]
    return [grad if needed else None for grad, needed in zip(grads, plan.needs, strict=False)]


def _run_backward(
    plan: CallPlan,
    grads: list[Any],
    tensors: list[Any],
    trace: Trace,
    targets: Targets,
    state: Tensors = (),
) -> None:
    """The backward of one trace; `grads` are those of `run_backward`."""
    segment = trace.segment
    if trace.stages is not None:
        steps = (0, len(plan.chain.steps)) if segment is None else (segment.start, segment.stop)
        record = _record_of(tensors, trace.stages, steps[0], targets)
        tensors.clear()
        return run_backward(plan.bound(state), grads, record, *steps)
    assert segment is not None
    made = [grads[v] for v in segment.makes]
    for v in segment.makes:
        grads[v] = None
    results = segment.backward(plan, made, tensors, targets, state)
    for v, grad in zip(segment.reads, results, strict=False):
        grads[v] = add_grads(grads[v], grad)
    grads[segment.parameters] = results[len(segment.reads) :]


def _record_of(
    tensors: Tensors, stages: Sequence[tuple[int, Any]], first: int, targets: Targets
) -> list[Saved]:
    """What each stage saved, of what all did."""
    start, record = 0, []
    for i, (count, facts) in enumerate(stages, first):
        record.append(Saved(tuple(tensors[start : start + count]), facts, targets.get(i)))
        start += count
    return record


def _segments_of(plan: CallPlan, inputs: Sequence[Any]) -> list[Segment]:
    """The segments of calls with such inputs; none where all runs stage by stage.

    Calls are recorded only where the host is what takes time.
    """
    recordings = plan.recordings
    if recordings is None:
        return []
    first = inputs[0]
    values = plan.chain.inputs
    key = first.shape if values == 1 else tuple([x is None or x.shape for x in inputs[:values]])
    found: list[Segment] | None = recordings.get(key)
    if found is None:
        if len(recordings) >= _MOST_SHAPES:
            return []
        found = recordings[key] = _segments(plan) if first.nbytes <= HOST_BOUND_BYTES else []
    return found


def _segments(plan: CallPlan) -> list[Segment]:
    steps = _recordable_steps(plan)
    segments = []
    for possible, parts in groupby(plan.chain.parts, lambda part: all(steps[slice(*part)])):
        bounds = list(parts)
        segments.append(Segment(plan, bounds[0][0], bounds[-1][1], possible))
    return segments if any([segment.recordable for segment in segments]) else []


def _recordable_steps(plan: CallPlan) -> list[bool]:
    """Of each step, whether it may be recorded."""
    steps = plan.chain.steps
    found = [step.stage.recordable(own) for step, own in zip(steps, plan.stage_plans, strict=True)]
    for i in reversed(range(len(steps))):
        if steps[i].stage.records_with_readers:
            made = set(steps[i].outputs)
            readers = [j for j, step in enumerate(steps) if made.intersection(step.inputs)]
            found[i] = found[i] and all([found[j] for j in readers])
    return found
