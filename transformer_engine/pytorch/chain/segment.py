"""A segment is a run of parts of a chain, for one plan and one shape of its inputs.

It is recorded at the first call; where that is refused it runs stage by stage, every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.chain import recording
from transformer_engine.pytorch.chain.chain import (
    Targets,
    reader,
    run_backward,
    run_forward,
)
from transformer_engine.pytorch.chain.gemm import count_group
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.recording import Buffers, BufferSlice, Recorded, Tensors
from transformer_engine.pytorch.chain.stages.base import Saved

_MOST_BYTES = 256 * 1024 * 1024  # that a recorded call asks for

_Reader = Callable[[Buffers], Sequence[torch.Tensor | None]]


class Trace(NamedTuple):
    """What a part of a call left for its backward.

    Attributes:
        segment: that ran; None for all stages of the chain, one by one.
        tensors: how many of the saved ones are its.
        stages: for each stage how many of those it saved, and which facts; None where the segment
            ran from a recording.
    """

    segment: Segment | None
    tensors: int
    stages: Sequence[tuple[int, Any]] | None


def traced(
    segment: Segment | None, record: Sequence[Saved]
) -> tuple[Trace, list[torch.Tensor | None]]:
    """The trace of stages that ran one by one, and the tensors to save."""
    tensors = [t for saved in record for t in saved.tensors]
    return Trace(segment, len(tensors), [(len(s.tensors), s.facts) for s in record]), tensors


class Segment:
    """Some steps of a chain, for one plan and one shape of its inputs.

    Args:
        plan: whose calls it runs.
        start: the first step.
        stop: the one behind the last.
        recordable: none of its stages does more than call `_C`.

    Attributes:
        reads: the values that come from outside; all that come in, if it is all of the chain.
        makes: the values that are read outside; what the chain returns, if it is all of it.
        parameters: the numbers of its parameters.
        last_reads: the values that no later segment reads.
        read_inputs: takes out of all values what `forward` reads.
        refused: why there is no recording, and will be none; `""` where there may be one.
    """

    def __init__(self, plan: CallPlan, start: int, stop: int, recordable: bool) -> None:
        self.start, self.stop = start, stop
        self.recordable = recordable
        chain = plan.chain
        steps = chain.steps[start:stop]
        made = {v for step in steps for v in step.outputs}
        later = {v for step in chain.steps[stop:] for v in step.inputs}
        read = dict.fromkeys(v for step in steps for v in step.inputs)
        self.reads = tuple([v for v in read if v not in made])
        self.makes = tuple([v for v in sorted(made) if v in later or v in chain.outputs])
        self.last_reads = [v for step in steps for v in step.last_reads if v in self.reads]
        if len(steps) == len(chain.steps):
            self.reads, self.makes = tuple(range(chain.inputs)), chain.outputs
        self.parameters = slice(steps[0].parameters.start, steps[-1].parameters.stop)
        numbers = [*self.reads, *range(self.parameters.start, self.parameters.stop)]
        self.read_inputs = reader(numbers)
        position = {v: i for i, v in enumerate(numbers)}  # among the inputs of a call
        seeds = [(i, step.parameters.stop - 1) for i, step in enumerate(steps, start)]
        self._seeds = [(i, position[v]) for i, v in seeds if chain.steps[i].stage.draws]
        self._fp8_weights = [position[v] for v in plan.fp8_weights if v in position]
        stages = [step.stage for step in steps]
        self._caching = [pair for pair in plan.caching if pair[0] in stages]
        self.refused = "" if recordable else "a stage does more than call _C"
        self.recorded: Recorded | None = None
        self._trace = Trace(self, 0, None)
        self._results: _Reader = list
        self._saved: _Reader = list
        self._stages: list[tuple[list[BufferSlice | None], Any]] = []
        self._backwards: dict[Any, tuple[Recorded, _Reader] | str] = {}

    def forward(
        self, plan: CallPlan, inputs: tuple[Any, ...], state: Tensors = ()
    ) -> tuple[Sequence[Any], Sequence[torch.Tensor | None], Trace]:
        """Run it.

        Args:
            plan: of the call.
            inputs: the values that it reads, and its parameters.
            state: what stands behind them where the plan has stand-ins for it.

        Returns:
            The values that it makes, the tensors to save, and the trace.
        """
        if not self.refused:
            if self._seeds:
                inputs = self._with_seeds(plan, inputs)
            brought = inputs
            if self._fp8_weights or self._caching:
                brought = self._with_weights(inputs)
            if state:
                brought = (*brought, *state)
            recorded = self.recorded or self._record(plan, brought, inputs)
            buffers = None if recorded is None else recorded.run(brought)
            if buffers is not None:
                count_group(recorded.gemms)  # type: ignore[union-attr]
                return self._results(buffers), self._saved(buffers), self._trace
        values = self._values(plan, inputs)
        del inputs
        plan = plan.bound(state)
        trace, tensors = traced(self, run_forward(plan, values, self.start, self.stop))
        return [values[v] for v in self.makes], tensors, trace

    def _with_seeds(self, plan: CallPlan, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs, with new seeds where there are none."""
        found, device = list(inputs), inputs[0].device
        for i, seed in self._seeds:
            plan.chain.steps[i].draw_seed(plan.stage_plans[i], found, seed, device)
        return tuple(found)

    def _with_weights(self, inputs: Any) -> tuple[Any, ...]:
        """The inputs; what weights in FP8 consist of, and what is cached of others, stands behind.

        Nothing at all where something is yet to be cached.
        """
        found = list(inputs)
        for i in self._fp8_weights:
            found += inputs[i].parts
            found[i] = None
        for stage, stage_plan in self._caching:
            cached = stage.cached(stage_plan)
            if cached is None:
                return ()
            found += cached
        return tuple(found)

    def _values(self, plan: CallPlan, inputs: Sequence[Any]) -> list[Any]:
        """All values of the chain, where these inputs are known."""
        values: list[Any] = [None] * len(plan.chain.names)
        for v, x in zip(self.reads, inputs, strict=False):
            values[v] = x
        values[self.parameters] = inputs[len(self.reads) :]
        return values

    def _watch(
        self,
        plan: CallPlan,
        inputs: Tensors,
        ours: Buffers,
        direct: Tensors,
        python: Callable[[], tuple[Tensors, Tensors]],
    ) -> Recorded | str:
        """What `recording.record` returns, unless it needs too much memory."""
        steps, plans = plan.chain.steps, plan.stage_plans
        if plan.state is not None:
            brought = [*inputs, *direct]
            known = [*ours, *plan.state]
            recorded = recording.record(brought, known, (), [], python, apart=True)
            return recorded
        persistent = [
            tensor
            for i in range(self.start, self.stop)
            for tensor in steps[i].stage.persistent_tensors(plans[i])
        ]
        recorded = recording.record(inputs, ours, direct, persistent, python)
        if isinstance(recorded, str) or recorded.bytes <= _MOST_BYTES:
            return recorded
        return "it needs too much memory"

    def _record(
        self, plan: CallPlan, brought: Sequence[Any], inputs: Sequence[Any]
    ) -> Recorded | None:
        if not brought:
            return None
        count = len(inputs)
        ours = recording.stand_ins(brought[:count])
        watched: list[Saved] = []

        def python() -> tuple[Tensors, Tensors]:
            read: list[Any] = [*ours]
            for i in self._fp8_weights:  # their codes and scales are brought directly
                read[i] = inputs[i]
            mine = self._values(plan, read)
            watched.extend(run_forward(plan, mine, self.start, self.stop))
            return [mine[v] for v in self.makes], [t for s in watched for t in s.tensors]

        recorded = self._watch(plan, brought[:count], ours, brought[count:], python)
        if isinstance(recorded, str):
            self.refused = recorded
            return None
        self.recorded = recorded
        self._results = _reader_of(recorded.results)
        slots = sorted({place.slot for place in recorded.saved if place is not None})
        self._saved = reader(slots)
        self._trace = Trace(self, len(slots), None)
        index = {slot: i for i, slot in enumerate(slots)}
        places = iter([p if p is None else p._replace(slot=index[p.slot]) for p in recorded.saved])
        self._stages = [([next(places) for _ in saved.tensors], saved.facts) for saved in watched]
        return recorded

    def backward(
        self,
        plan: CallPlan,
        made: Sequence[torch.Tensor | None],
        buffers: list[torch.Tensor | None],
        targets: Targets,
        state: Tensors = (),
    ) -> list[Any]:
        """Run the backward of the recording, recorded in its turn where that can be.

        Args:
            plan: of the forward.
            made: gradients of the values that it made.
            buffers: what the forward left. The list is emptied.
            targets: of weight gradients.
            state: see `forward`.

        Returns:
            Gradients of the values that it reads, and of its parameters.
        """
        inputs = (*made, *buffers)
        key: tuple[Any, ...] = tuple([grad is None for grad in made])
        inputs = (*inputs, *state)
        mine: Targets = {}
        if targets:
            mine = {i: t for i, t in targets.items() if self.start <= i < self.stop}
            inputs = (*inputs, *[t.main_grad for t in mine.values()])
            key = (*key, *[t.how for t in mine.values()])
        found = self._backwards.get(key)
        if found is None:
            found = self._backwards[key] = self._record_backward(plan, inputs, mine)
        if not isinstance(found, str):
            recorded, results_of = found
            memory = recorded.run(inputs)
            if memory is not None:
                count_group(recorded.gemms)
                return list(results_of(memory))
        record = self._views(buffers, mine)
        del inputs
        buffers.clear()
        return self._backward_by_stages(plan.bound(state), made, record)

    def _backward_by_stages(
        self, plan: CallPlan, made: Sequence[torch.Tensor | None], record: list[Saved]
    ) -> list[Any]:
        grads: list[Any] = [None] * len(plan.chain.names)
        for v, grad in zip(self.makes, made, strict=True):
            grads[v] = grad
        run_backward(plan, grads, record, self.start, self.stop)
        return [*[grads[v] for v in self.reads], *grads[self.parameters]]

    def _views(self, buffers: Sequence[Any], targets: Targets) -> list[Saved]:
        """What each stage saved, as views into the buffers."""
        return [
            Saved(
                tuple([p if p is None else p.within(buffers[p.slot]) for p in places]),
                facts,
                targets.get(i),
            )
            for i, (places, facts) in enumerate(self._stages, self.start)
        ]

    def _record_backward(
        self, plan: CallPlan, inputs: Tensors, targets: Targets
    ) -> tuple[Recorded, _Reader] | str:
        ours = recording.stand_ins(inputs)
        first, end = len(self.makes), len(ours)
        if plan.state is not None:
            end -= len(plan.state)
            ours[end:] = plan.state
        last = end - len(targets)
        into = zip(targets.items(), ours[last:end], strict=True)
        mine = {i: target._replace(main_grad=t) for (i, target), t in into}
        record = self._views(ours[first:last], mine)

        def python() -> tuple[Tensors, Tensors]:
            grads = self._backward_by_stages(plan, ours[:first], record)
            parameters = zip(grads[len(self.reads) :], plan.needs[self.parameters], strict=True)
            needed = [grad if need else None for grad, need in parameters]
            return [*grads[: len(self.reads)], *needed], ()

        if plan.state is not None:
            recorded = recording.record(inputs, ours, (), [], python)
        else:
            recorded = self._watch(plan, inputs, ours, (), python)
        return recorded if isinstance(recorded, str) else (recorded, _reader_of(recorded.results))


def _reader_of(places: Sequence[BufferSlice | None]) -> _Reader:
    """A function that takes these tensors out of the buffers of a call."""
    if all(place is not None and place.whole for place in places):
        return reader([place.slot for place in places])  # type: ignore[union-attr]
    return lambda buffers: [
        None if place is None else place.within(buffers[place.slot])  # type: ignore[arg-type]
        for place in places
    ]
