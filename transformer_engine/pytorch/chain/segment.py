"""A segment is a run of parts of a chain, for one plan and one shape of its inputs.

It is recorded at the first call; where that is refused it runs stage by stage, every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.chain import recording
from transformer_engine.pytorch.chain.chain import (
    Chain,
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
        chain: of the plan.
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

    def __init__(self, chain: Chain, start: int, stop: int, recordable: bool) -> None:
        self.start, self.stop = start, stop
        self.recordable = recordable
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
        self._draws = [(i, step.stage) for i, step in enumerate(steps, start) if step.stage.draws]
        self.refused = "" if recordable else "a stage does more than call _C"
        self.recorded: Recorded | None = None
        self._trace = Trace(self, 0, None)
        self._results: _Reader = list
        self._saved: _Reader = list
        self._stages: list[tuple[list[BufferSlice | None], Any]] = []
        self._backwards: dict[Any, tuple[Recorded, _Reader] | str] = {}

    def forward(
        self, plan: CallPlan, inputs: tuple[Any, ...]
    ) -> tuple[Sequence[Any], Sequence[torch.Tensor | None], Trace]:
        """Run it.

        Args:
            plan: of the call.
            inputs: the values that it reads, and its parameters.

        Returns:
            The values that it makes, the tensors to save, and the trace.
        """
        if not self.refused:
            if self._draws:
                inputs = self._with_seeds(plan, inputs)
            brought = inputs
            if plan.fp8_weights or plan.caching:
                brought = self._with_weights(plan, inputs)
            recorded = self.recorded or self._record(plan, brought, inputs)
            buffers = None if recorded is None else recorded.run(brought)
            if buffers is not None:
                count_group(recorded.gemms)  # type: ignore[union-attr]
                return self._results(buffers), self._saved(buffers), self._trace
        values: list[Any] = [None] * len(plan.chain.names)
        for v, x in zip(self.reads, inputs, strict=False):
            values[v] = x
        values[self.parameters] = inputs[len(self.reads) :]
        del inputs
        trace, tensors = traced(self, run_forward(plan, values, self.start, self.stop))
        return [values[v] for v in self.makes], tensors, trace

    def _with_seeds(self, plan: CallPlan, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs, with new seeds where there are none."""
        found, device = list(inputs), inputs[0].device
        shift = len(self.reads) - self.parameters.start
        for i, stage in self._draws:
            seed = plan.chain.steps[i].parameters.stop - 1 + shift
            if found[seed] is None:
                found[seed] = stage.draw(plan.stage_plans[i], device)
        return tuple(found)

    def _with_weights(self, plan: CallPlan, inputs: Any) -> tuple[Any, ...]:
        """The inputs; what weights in FP8 consist of, and what is cached of others, stands behind.

        Nothing at all where something is yet to be cached.
        """
        found = list(inputs)
        shift = len(self.reads) - self.parameters.start
        for i in plan.fp8_weights:
            if self.parameters.start <= i < self.parameters.stop:
                found += inputs[i + shift].parts
                found[i + shift] = None
        own = [step.stage for step in plan.chain.steps[self.start : self.stop]]
        for stage, stage_plan in plan.caching:
            if stage in own:
                cached = stage.cached(stage_plan)
                if cached is None:
                    return ()
                found += cached
        return tuple(found)

    def _persistent(self, plan: CallPlan) -> list[torch.Tensor]:
        steps, plans = plan.chain.steps, plan.stage_plans
        return [
            tensor
            for i in range(self.start, self.stop)
            for tensor in steps[i].stage.persistent_tensors(plans[i])
        ]

    def _record(
        self, plan: CallPlan, brought: Sequence[Any], inputs: Sequence[Any]
    ) -> Recorded | None:
        if not brought:
            return None
        count = len(inputs)
        ours = recording.stand_ins(brought[:count])
        watched: list[Saved] = []

        def python() -> tuple[Tensors, Tensors]:
            mine: list[Any] = [None] * len(plan.chain.names)
            for v, x in zip(self.reads, ours, strict=False):
                mine[v] = x
            mine[self.parameters] = ours[len(self.reads) :]
            for i in plan.fp8_weights:  # their codes and scales are brought directly
                if self.parameters.start <= i < self.parameters.stop:
                    mine[i] = inputs[i + len(self.reads) - self.parameters.start]
            watched.extend(run_forward(plan, mine, self.start, self.stop))
            return [mine[v] for v in self.makes], [t for s in watched for t in s.tensors]

        direct, persistent = brought[count:], self._persistent(plan)
        recorded = recording.record(brought[:count], ours, direct, persistent, python)
        if isinstance(recorded, str) or recorded.bytes > _MOST_BYTES:
            self.refused = recorded if isinstance(recorded, str) else "it needs too much memory"
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
    ) -> list[Any]:
        """Run the backward of the recording, recorded in its turn where that can be.

        Args:
            plan: of the forward.
            made: gradients of the values that it made.
            buffers: what the forward left. The list is emptied.
            targets: of weight gradients.

        Returns:
            Gradients of the values that it reads, and of its parameters.
        """
        inputs = (*made, *buffers)
        key: tuple[Any, ...] = tuple([grad is None for grad in made])
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
        grads: list[Any] = [None] * len(plan.chain.names)
        for v, grad in zip(self.makes, made, strict=True):
            grads[v] = grad
        del inputs, made
        buffers.clear()
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
        first, last = len(self.makes), len(ours) - len(targets)
        into = zip(targets.items(), ours[last:], strict=True)
        mine = {i: target._replace(main_grad=t) for (i, target), t in into}
        record = self._views(ours[first:last], mine)

        def python() -> tuple[Tensors, Tensors]:
            grads: list[Any] = [None] * len(plan.chain.names)
            for v, grad in zip(self.makes, ours, strict=False):
                grads[v] = grad
            run_backward(plan, grads, record, self.start, self.stop)
            needed = zip(grads[self.parameters], plan.needs[self.parameters], strict=True)
            return [*[grads[v] for v in self.reads], *[g if n else None for g, n in needed]], ()

        recorded = recording.record(inputs, ours, (), self._persistent(plan), python)
        if isinstance(recorded, str):
            return recorded
        if recorded.bytes > _MOST_BYTES:
            return "it needs too much memory"
        return recorded, _reader_of(recorded.results)


def _reader_of(places: Sequence[BufferSlice | None]) -> _Reader:
    """A function that takes these tensors out of the buffers of a call."""
    if all(place is not None and place.whole for place in places):
        return reader([place.slot for place in places])  # type: ignore[union-attr]
    return lambda buffers: [
        None if place is None else place.within(buffers[place.slot])  # type: ignore[arg-type]
        for place in places
    ]
