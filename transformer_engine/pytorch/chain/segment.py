"""A segment is a run of parts of a chain, for one plan and one shape of its inputs.

It is recorded at the first call; where that is refused it runs stage by stage, every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.chain import recording
from transformer_engine.pytorch.chain.chain import Targets, reader
from transformer_engine.pytorch.chain.gemm import count_group
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.recording import Buffers, BufferSlice, Recorded, Tensors
from transformer_engine.pytorch.chain.stage_by_stage import add_grads, run_backward, run_forward
from transformer_engine.pytorch.chain.stages.base import Saved
from transformer_engine.pytorch.fp8.operands import (
    PARTS,
    Operands,
    built,
    flat,
    kind_of,
    operands_like,
    parts_of,
)
from transformer_engine.pytorch.parallel.collectives import waited

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
        overlaps: the parameters' gradients of its first step are computed apart: while the backward
            of the collective runs that has made its input, or later.
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
        first = steps[0].producer
        self.overlaps = first >= 0 and chain.steps[first].stage.communicates
        self.overlaps |= steps[0].stage.delays(plan.stage_plans[start])
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
        self.backwards: dict[Any, tuple[Recorded, _Reader] | str] = {}

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
            if self._fp8_weights or self._caching or self.start:
                brought = self._with_parts(inputs)
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

    def _operands(self, inputs: Sequence[Any]) -> list[int]:
        """Which of the inputs are operands, that another segment has made."""
        if not self.start:
            return []
        return [i for i in range(len(self.reads)) if type(inputs[i]) is Operands]

    def _with_parts(self, inputs: Any) -> tuple[Any, ...]:
        """The inputs, then what operands and FP8 weights consist of, and what is cached.

        Nothing at all where something is yet to be cached.
        """
        found = list(inputs)
        for i in self._operands(inputs):
            found += parts_of(inputs[i])
            found[i] = None
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

    def watch(
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
            known = [*ours, *plan.state]
            return recording.record([*inputs, *direct], known, (), [], python, apart=True)
        # A norm may cast for a Matmul of another segment, if that is of the same part.
        first = max([start for start, _ in plan.chain.parts if start <= self.start])
        own = range(first, min([stop for _, stop in plan.chain.parts if stop >= self.stop]))
        persistent = [t for i in own for t in steps[i].stage.persistent_tensors(plans[i])]
        recorded = recording.record(inputs, ours, direct, persistent, python)
        if isinstance(recorded, str) or recorded.bytes <= _MOST_BYTES:
            return recorded
        return "it needs too much memory"

    def _record(
        self, plan: CallPlan, brought: Sequence[Any], inputs: Sequence[Any]
    ) -> Recorded | None:
        if not brought:
            return None
        operands = self._operands(inputs)
        count = len(inputs) + PARTS * len(operands)
        ours = recording.stand_ins(brought[:count])
        watched: list[Saved] = []
        made: list[Any] = []

        def python() -> tuple[Tensors, Tensors]:
            read: list[Any] = ours[: len(inputs)]
            for k, i in enumerate(operands):
                own = slice(len(inputs) + PARTS * k, len(inputs) + PARTS * (k + 1))
                read[i] = operands_like(inputs[i], ours[own])
            for i in self._fp8_weights:  # their codes and scales are brought directly
                read[i] = inputs[i]
            mine = self._values(plan, read)
            watched.extend(run_forward(plan, mine, self.start, self.stop))
            made.extend([waited(mine[v]) for v in self.makes])
            return flat(made), [t for s in watched for t in s.tensors]

        recorded = self.watch(plan, brought[:count], ours, brought[count:], python)
        if isinstance(recorded, str):
            self.refused = recorded
            return None
        self.recorded = recorded
        self._results = _building(reader_of(recorded.results), made)
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
        made: Sequence[Any],
        buffers: list[torch.Tensor | None],
        targets: Targets,
        state: Tensors = (),
    ) -> list[Any]:
        """Run the backward of the recording, recorded in its turn where that can be.

        Args:
            plan: of the forward.
            made: gradients of the values that it made.
            buffers: what the forward left. The list is emptied, unless it is to be read later.
            targets: of weight gradients.
            state: see `forward`.

        Returns:
            Gradients of the values that it reads, and of its parameters; where it `overlaps`, what
            its first step carries on with stands behind.
        """
        inputs: tuple[Any, ...] = (*made, *buffers)
        key: tuple[Any, ...] = tuple([grad is None for grad in made])
        if plan.in_tf32:
            key = (*key, "tf32")
        if Operands in [type(grad) for grad in made]:
            inputs = (*flat(made), *buffers)
        inputs = (*inputs, *state)
        mine: Targets = {}
        if targets:
            mine = {i: t for i, t in targets.items() if self.start <= i < self.stop}
            inputs = (*inputs, *[t.main_grad for t in mine.values()])
            key = (*key, *[t.how for t in mine.values()])
        found = self.backwards.get(key)
        if found is None:
            found = self.backwards[key] = self._record_backward(plan, inputs, made, mine)
        if not isinstance(found, str):
            recorded, results_of = found
            memory = recorded.run(inputs)
            if memory is not None:
                count_group(recorded.gemms)
                return list(results_of(memory))
        record = self.views(buffers, mine)
        del inputs
        if not self.overlaps:
            buffers.clear()
        return self._backward_by_stages(plan.bound(state), made, record)

    def _backward_by_stages(
        self, plan: CallPlan, made: Sequence[Any], record: list[Saved]
    ) -> list[Any]:
        grads: list[Any] = [None] * len(plan.chain.names)
        for v, grad in zip(self.makes, made, strict=True):
            grads[v] = grad
        last = run_backward(plan, grads, record, self.start, self.stop)
        carry = [None if last is None else last.carry] if self.overlaps else []
        return [*[grads[v] for v in self.reads], *grads[self.parameters], *carry]

    def put(self, grads: list[Any], results: Sequence[Any]) -> None:
        """Put what `backward` returned where it belongs among the gradients of all values."""
        count = len(self.reads)
        for v, grad in zip(self.reads, results, strict=False):
            grads[v] = add_grads(grads[v], grad)
        parameters = self.parameters.stop - self.parameters.start
        grads[self.parameters] = results[count : count + parameters]

    def views(self, buffers: Sequence[Any], targets: Targets) -> list[Saved]:
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
        self, plan: CallPlan, inputs: Tensors, made: Sequence[Any], targets: Targets
    ) -> tuple[Recorded, _Reader] | str:
        ours = recording.stand_ins(inputs)
        first, end = len(flat(made)), len(inputs)
        if plan.state is not None:
            end -= len(plan.state)
            ours[end:] = plan.state
        last = end - len(targets)
        into = zip(targets.items(), ours[last:end], strict=True)
        mine = {i: target._replace(main_grad=t) for (i, target), t in into}
        record = self.views(ours[first:last], mine)
        template: list[Any] = []

        def python() -> tuple[Tensors, Tensors]:
            grads = self._backward_by_stages(plan, built(ours[:first], made), record)
            reads = len(self.reads)
            needs = plan.needs[self.parameters]
            carry = grads[reads + len(needs) :]
            parameters = zip(grads[reads : reads + len(needs)], needs, strict=True)
            needed = [grad if need else None for grad, need in parameters]
            template.extend([*grads[:reads], *needed, *carry])
            return flat(template), ()

        if plan.state is not None:
            recorded = recording.record(inputs, ours, (), [], python)
        else:
            recorded = self.watch(plan, inputs, ours, (), python)
        if isinstance(recorded, str):
            return recorded
        return recorded, _building(reader_of(recorded.results), template)


def _building(read: _Reader, like: Sequence[Any]) -> _Reader:
    """A reader of what is like these."""
    kinds = [kind_of(x) if type(x) is Operands else None for x in like]
    if not any(kinds):
        return read
    return lambda buffers: built(read(buffers), kinds)


def reader_of(places: Sequence[BufferSlice | None]) -> _Reader:
    """A function that takes these tensors out of the buffers of a call."""
    if all(place is not None and place.whole for place in places):
        return reader([place.slot for place in places])  # type: ignore[union-attr]
    return lambda buffers: [
        None if place is None else place.within(buffers[place.slot])  # type: ignore[arg-type]
        for place in places
    ]
