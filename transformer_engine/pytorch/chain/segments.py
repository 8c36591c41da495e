"""Runs chains segment by segment: recorded segments by one call of `_C`, others stage by stage.

The first call with its shapes cuts the chain into segments. Values that pass from one segment to
the next are tensors of their own, never slices of a buffer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import torch

from transformer_engine.pytorch.capture import is_host_bound
from transformer_engine.pytorch.chain.agreement import check_agreement
from transformer_engine.pytorch.chain.chain import ChainStep, Targets
from transformer_engine.pytorch.chain.overlap import overlapped_backward
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.segment import Segment, Trace, traced
from transformer_engine.pytorch.chain.stage import Saved
from transformer_engine.pytorch.chain.stage_by_stage import (
    ParamGradTask,
    add_grads,
    finish,
    run_backward,
    run_forward,
)
from transformer_engine.pytorch.chain.stand_ins import Tensors
from transformer_engine.pytorch.parallel.collectives import waited


class Segments(list[Segment]):
    """The segments of calls with inputs of one shape.

    Attributes:
        apart: the same steps, cut at the collectives; None until a call needs it. The recompute of
            a call finds again the segments of its first forward, although `joins` has changed.
    """

    apart: Segments | None = None


def forward(
    plan: CallPlan, inputs: tuple[Any, ...], state: Tensors = ()
) -> tuple[Sequence[Any], Sequence[torch.Tensor | None], Sequence[Trace]]:
    """Run the forward of a plan; `inputs` are the values that come in, and the parameters.

    `state` is scaling state, if the plan has stand-ins for it (`CallPlan.state`).

    Returns:
        What the chain returns, the tensors to save for the backward, and the traces of the call.
    """
    found = _segments_of(plan, inputs)
    if len(found) == 1:
        results, saved, trace = found[0].forward(plan, inputs, state)
        plan.unrecorded = () if trace.stages is None else (found[0].start,)
        if plan.unrecorded:
            results = [waited(result) for result in results]
        return results, saved, (trace,)
    chain = plan.chain
    values = [*inputs, *chain.results]
    if not found:
        trace, tensors = traced(None, run_forward(plan.bound(state), values, 0, len(chain.steps)))
        if not plan.compiling:  # writing to an object from outside makes Dynamo return all tensors
            plan.unrecorded = None
        return [waited(values[v]) for v in chain.outputs], tensors, (trace,)
    tensors, traces = [], []
    for segment in found:
        if segment.recordable:
            for v in segment.reads:
                values[v] = waited(values[v])
        results, saved, trace = segment.forward(plan, segment.read_inputs(values), state)
        for v in segment.last_reads:
            values[v] = None
        for v, result in zip(segment.makes, results, strict=True):
            values[v] = result
        traces.append(trace)
        tensors += saved
    pairs = zip(found, traces, strict=True)
    plan.unrecorded = tuple([one.start for one, trace in pairs if trace.stages is not None])
    return [waited(values[v]) for v in chain.outputs], tensors, traces


def backward(
    plan: CallPlan,
    grad_outputs: Sequence[torch.Tensor | None],
    tensors: list[torch.Tensor | None],
    traces: Sequence[Trace],
    targets: Targets,
    state: Tensors = (),
) -> list[torch.Tensor | None]:
    """Gradients of the values that came in and of the parameters.

    `grad_outputs` are contiguous. The list `tensors`, saved by the forward, is emptied, which frees
    memory after each segment.
    """
    chain = plan.chain
    only = traces[0].segment if len(traces) == 1 and traces[0].stages is None else None
    if only is not None and not only.overlaps:
        grads = only.backward(plan, grad_outputs, tensors, targets, state)
    else:
        grads = [None] * len(chain.names)
        for v, grad in zip(chain.outputs, grad_outputs, strict=True):
            grads[v] = add_grads(grads[v], grad)
        task: ParamGradTask | None = None
        for i in reversed(range(len(traces))):
            own = _pop_tensors(tensors, traces[i])
            regathered = _regathered(plan, tensors, traces, i)
            next_task = _run_backward(plan, grads, own, traces[i], targets, regathered, state)
            finish(task)  # by now the collective that it overlaps has started
            task = next_task
        finish(task)
        grads = [waited(grad) for grad in grads[: len(plan.needs)]]
    if False not in plan.needs:
        return grads[: len(plan.needs)]
    return [grad if needed else None for grad, needed in zip(grads, plan.needs, strict=False)]


def _pop_tensors(tensors: list[Any], trace: Trace) -> list[Any]:
    """Remove and return the tensors of the last trace."""
    own = tensors[len(tensors) - trace.tensors :]
    del tensors[len(tensors) - trace.tensors :]
    return own


def _regathered(plan: CallPlan, tensors: list[Any], traces: Sequence[Trace], i: int) -> Any:
    """The first input of a segment, if the stage before it gathers it again."""
    segment, before = traces[i].segment, traces[i - 1]
    number = -1 if segment is None else segment.start - 1
    if number < 0 or not plan.chain.steps[number].stage.regathers:
        return None
    if before.stages is None or not before.stages[0][0]:
        return None
    saved = _record_of(tensors[len(tensors) - before.tensors :], before.stages, number, {})
    return plan.chain.steps[number].stage.regather(saved[0], plan.stage_plans[number])


def _run_backward(
    plan: CallPlan,
    grads: list[Any],
    tensors: list[Any],
    trace: Trace,
    targets: Targets,
    regathered: Any,
    state: Tensors,
) -> Any:
    """The backward of one segment; returns the task of its first step, see `run_backward`."""
    segment = trace.segment
    if trace.stages is not None:
        steps, bound = (0, len(plan.chain.steps)), plan.bound
        if segment is not None:
            steps, bound = (segment.start, segment.stop), partial(segment.bound, plan)
        record = _record_of(tensors, trace.stages, steps[0], targets)
        tensors.clear()
        return run_backward(bound(state), grads, record, *steps, regathered)
    assert segment is not None
    made = [waited(grads[v]) for v in segment.makes]
    for v in segment.makes:
        grads[v] = None
    if segment.overlaps:
        return overlapped_backward(segment, plan, grads, made, tensors, targets, regathered)
    results = segment.backward(plan, made, tensors, targets, state)
    segment.add_results(grads, results)
    return None


def _record_of(
    tensors: Tensors, stages: Sequence[tuple[int, Any]], first: int, targets: Targets
) -> list[Saved]:
    """What each stage saved, cut out of the list of the tensors of all stages."""
    start, record = 0, []
    for i, (count, facts) in enumerate(stages, first):
        record.append(Saved(tuple(tensors[start : start + count]), facts, targets.get(i)))
        start += count
    return record


def _segments_of(plan: CallPlan, inputs: Sequence[Any]) -> list[Segment]:
    """The segments of calls with such inputs; none if the chain runs stage by stage.

    A collective is a segment by itself, unless it is recorded with the stages around it.
    """
    recordings = plan.recordings
    if recordings is None:
        return []  # Dynamo of torch 2.11 cannot trace a `Segments`
    first, count = inputs[0], plan.chain.inputs
    key: Any = first.shape if count == 1 else tuple([x is None or x.shape for x in inputs[:count]])
    if plan.chain.takes_strides:
        key = (key, *[x is None or x.stride() for x in inputs[:count]])
    if plan.in_tf32:
        key = (key, "tf32")
    if plan.members:
        key = (key, plan.members)
    found: Segments | None = recordings.get(key)
    plan.admitted = found is not None
    if found is None:
        plan.admitted = recordings.admits(key, plan.chain.most_shapes, plan.may_run_differently)
        if plan.admitted and plan.chain.communicates:
            check_agreement(plan, inputs)
        found = _segments(plan, plan.admitted, first, joins=True)
        if plan.admitted:
            recordings[key] = found
    if plan.joins or not any([segment.joined for segment in found]):
        return found
    # Ranks may differ here: the order of their collectives does not depend on segments.
    if found.apart is None:
        found.apart = _segments(plan, True, first, joins=False)
    return found.apart


def _segments(plan: CallPlan, recorded: bool, first: torch.Tensor, joins: bool) -> Segments:
    if not (recorded or plan.chain.communicates):
        return Segments()
    steps, segments, large = _recordable_steps(plan), Segments(), not is_host_bound(first)
    if not (any(steps) or plan.chain.communicates):
        return segments
    pairs = zip(plan.chain.steps, plan.stage_plans, strict=True)
    delayed = {i for i, (step, own) in enumerate(pairs) if step.stage.delays(own)}
    # No cut before a GEMM that cannot be recorded: the stage before it makes operands in Python.
    cuts = {i for i in delayed if steps[i]}
    collective = {i for i, step in enumerate(plan.chain.steps) if step.stage.communicates}
    if recorded and joins and not delayed:
        stages = [plan.chain.steps[i].stage for i in collective]
        if all([stage.joins(first) for stage in stages]):
            collective = set()
    if large:
        for i in _by_ranks(plan.chain.steps, collective):
            steps[i] = False

    def kind(piece: tuple[int, int]) -> tuple[bool, int]:
        own = piece[0] if piece[0] in collective | delayed else -1
        return recorded and own not in collective and all(steps[slice(*piece)]), own

    for (possible, _), pieces in groupby(_pieces(plan.chain.parts, collective, cuts), kind):
        bounds = list(pieces)
        segments.append(Segment(plan, bounds[0][0], bounds[-1][1], possible, large))
    if plan.chain.communicates or any([segment.recordable for segment in segments]):
        return segments
    return Segments()


def _by_ranks(steps: Sequence[ChainStep], collective: Collection[int]) -> Iterator[int]:
    """Yields the GEMMs that read or make rows rank by rank, beside a collective in parts."""
    for i in collective:
        if steps[i].stage.in_parts:
            for neighbour in (steps[i].producer, steps[i].consumer):
                if neighbour >= 0 and steps[neighbour].stage.multiplies:
                    yield neighbour


def _pieces(
    parts: Sequence[tuple[int, int]], collective: Collection[int], delayed: Collection[int]
) -> Iterator[tuple[int, int]]:
    """Yields the parts, cut before and after collectives and before stages that delay gradients."""
    for start, stop in parts:
        cuts = {start, stop} | {i for i in delayed if start <= i < stop}
        for i in collective:
            if start <= i < stop:
                cuts |= {i, i + 1}
        yield from pairwise(sorted(cuts))


def _recordable_steps(plan: CallPlan) -> list[bool]:
    """For each step, whether it may be recorded."""
    steps = plan.chain.steps
    found = [step.stage.recordable(own) for step, own in zip(steps, plan.stage_plans, strict=True)]
    for i in reversed(range(len(steps))):
        if steps[i].stage.records_with_readers:
            made = set(steps[i].outputs)
            readers = [j for j, step in enumerate(steps) if made.intersection(step.inputs)]
            found[i] = found[i] and all([found[j] for j in readers])
    return found
