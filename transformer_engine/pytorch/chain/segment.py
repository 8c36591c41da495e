"""A segment is a group of consecutive steps of a chain, for one plan and one shape of its inputs.

The first call records it. If recording is refused, every call runs it stage by stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.chain import recording
from transformer_engine.pytorch.chain.chain import Targets, reader
from transformer_engine.pytorch.chain.operator_memory import Reading
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.recording import BufferSlice, Recorded
from transformer_engine.pytorch.chain.stage import Saved
from transformer_engine.pytorch.chain.stage_by_stage import add_grads, run_backward, run_forward
from transformer_engine.pytorch.chain.stand_ins import Buffers, Tensors, stand_ins_of
from transformer_engine.pytorch.fp8.casts.operands import (
    OPERAND_TENSORS,
    Operands,
    flatten_operands,
    flatten_values,
    operands_like,
    structure_of,
    unflatten_values,
)
from transformer_engine.pytorch.parallel.collectives import waited

_MOST_BYTES = 512 * 1024 * 1024  # in slabs: a layer with a host-bound input takes less

_Reader = Callable[[Buffers], Sequence[torch.Tensor | None]]


class Trace(NamedTuple):
    """How one segment ran in the forward; its backward needs to know this.

    Attributes:
        segment: None if the whole chain ran stage by stage, without segments.
        tensors: how many of the saved tensors are this segment's.
        stages: for each stage how many tensors it saved, and its facts; None if the segment ran
            from a recording.
    """

    segment: Segment | None
    tensors: int
    stages: Sequence[tuple[int, Any]] | None


def traced(
    segment: Segment | None, record: Sequence[Saved]
) -> tuple[Trace, list[torch.Tensor | None]]:
    """The trace of stages that ran one by one, and the tensors that they saved."""
    tensors = [t for saved in record for t in saved.tensors]
    return Trace(segment, len(tensors), [(len(s.tensors), s.facts) for s in record]), tensors


class Segment:
    """Some steps of a chain, for one plan and one shape of its inputs.

    Args:
        plan: whose calls it runs.
        start: the first step.
        stop: the step behind the last one.
        recordable: its stages do nothing but allocate and call `_C`.
        large: memory matters more than host time: tensors share no slabs.

    Attributes:
        joined: it is recordable and contains collectives.
        reads: the values that it reads and does not make; for a whole chain, all inputs.
        makes: the values that it makes and others read; for a whole chain, all outputs.
        parameters: the numbers of its parameters.
        last_reads: the values that no later segment reads.
        overlaps: the gradients of the first step's parameters are a task of their own
            (`ParamGradTask`): it runs while the collective before the segment runs backward, or
            waits for `backward_dw`.
        read_inputs: takes the inputs of `forward` out of all values.
        refused: why the segment cannot be recorded; `""` if it may be.
        backwards: recordings of the backward, or why there is none, by the facts that may differ.
    """

    def __init__(
        self, plan: CallPlan, start: int, stop: int, recordable: bool, large: bool
    ) -> None:
        self.start, self.stop, self.recordable = start, stop, recordable
        chain = plan.chain
        self._slabs = recording.slabs_of(large, plan.state is not None and chain.communicates)
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
        self.joined = recordable and any([stage.communicates for stage in stages])
        plans = plan.stage_plans[start:stop]
        self._any_strides = all([a.records_strides(b) for a, b in zip(stages, plans, strict=True)])
        self._caching = [pair for pair in plan.caching if pair[0] in stages]
        self.refused = "" if recordable else "a stage does more than call _C"
        self.recorded: Recorded | None = None
        self._scales = plan.bind is not None and bool(self._persistent_tensors(plan))
        self._trace = Trace(self, 0, None)
        self._results: _Reader = list
        self._saved: _Reader = list
        self._stages: list[tuple[list[BufferSlice | None], Any]] = []
        self.backwards: dict[Any, tuple[Recorded, _Reader] | str] = {}

    def forward(
        self, plan: CallPlan, inputs: tuple[Any, ...], state: Tensors = ()
    ) -> tuple[Sequence[Any], Sequence[torch.Tensor | None], Trace]:
        """Run the forward; `inputs` are the values that it reads, and its parameters.

        `state` is scaling state, if the plan has stand-ins for it (`CallPlan.state`).

        Returns:
            The values that it makes, the tensors to save, and the trace.
        """
        if not self.refused and self.start not in plan.by_stages:
            if self._seeds:
                inputs = self._with_seeds(plan, inputs)
            tensors = inputs
            if self._fp8_weights or self._caching or self.start:
                tensors = self._flattened(inputs)
            if state:
                tensors = (*tensors, *state)
            recorded = self.recorded or self._record_forward(plan, tensors, inputs)
            buffers = None if recorded is None else recorded.run([*tensors])
            if buffers is not None:
                recorded.count_call()  # type: ignore[union-attr]
                return self._results(buffers), self._saved(buffers), self._trace
        values = self._values(plan, inputs)
        del inputs
        plan = self.bound(plan, state)
        trace, saved = traced(self, run_forward(plan, values, self.start, self.stop))
        return [values[v] for v in self.makes], saved, trace

    def _persistent_tensors(self, plan: CallPlan) -> list[torch.Tensor]:
        """Scaling state and caches of its stages."""
        # A norm may cast for a Matmul of its part in another segment, with that Matmul's scales.
        first = max([start for start, _ in plan.chain.parts if start <= self.start])
        own = range(first, min([stop for _, stop in plan.chain.parts if stop >= self.stop]))
        steps, plans = plan.chain.steps, plan.stage_plans
        return [t for i in own for t in steps[i].stage.persistent_tensors(plans[i])]

    def bound(self, plan: CallPlan, state: Tensors) -> CallPlan:
        """`plan.bound(state)`, if its stages read scaling state."""
        return plan.bound(state) if self._scales else plan

    def _with_seeds(self, plan: CallPlan, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs, with new seeds for stages that draw one."""
        seeded = list(inputs)
        device = next(x.device for x in inputs if isinstance(x, torch.Tensor))
        for i, seed in self._seeds:
            plan.chain.steps[i].draw_seed(plan.stage_plans[i], seeded, seed, device)
        return tuple(seeded)

    def _operands(self, inputs: Sequence[Any]) -> list[int]:
        """Which of the inputs are `Operands` that an earlier segment has made."""
        if not self.start:
            return []
        return [i for i in range(len(self.reads)) if type(inputs[i]) is Operands]

    def _flattened(self, inputs: Any) -> tuple[Any, ...]:
        """The inputs, followed by the tensors of operands and FP8 weights, and cached tensors.

        Operands and FP8 weights themselves are replaced by None. The tuple is empty if a stage has
        not cached its tensors yet.
        """
        tensors = list(inputs)
        for i in self._operands(inputs):
            tensors += flatten_operands(inputs[i])
            tensors[i] = None
        for i in self._fp8_weights:
            tensors += inputs[i].parts
            tensors[i] = None
        for stage, stage_plan in self._caching:
            cached = stage.cached(stage_plan)
            if cached is None:
                return ()
            tensors += cached
        return tuple(tensors)

    def _values(self, plan: CallPlan, inputs: Sequence[Any]) -> list[Any]:
        """A list for all values of the chain, which holds these inputs."""
        values: list[Any] = [None] * len(plan.chain.names)
        for v, x in zip(self.reads, inputs, strict=False):
            values[v] = x
        values[self.parameters] = inputs[len(self.reads) :]
        return values

    def record(
        self,
        plan: CallPlan,
        inputs: Tensors,
        stand_ins: Buffers,
        direct: Tensors,
        python: Callable[[], tuple[Tensors, Tensors]],
    ) -> Recorded | str:
        """`recording.record` with the persistent tensors of this segment, and a limit of memory."""
        if plan.state is not None:
            stand_ins, inputs = [*stand_ins, *plan.state], [*inputs, *direct]
            return recording.record(inputs, stand_ins, (), [], python, self._slabs)
        persistent = self._persistent_tensors(plan)
        facts = (persistent, python, self._slabs, _MOST_BYTES, self._any_strides)
        recorded = recording.record(inputs, stand_ins, direct, *facts)
        if isinstance(recorded, str):
            plan.joins &= not self.joined
        return recorded

    def _record_forward(
        self, plan: CallPlan, tensors: Sequence[Any], inputs: Sequence[Any]
    ) -> Recorded | None:
        if not tensors:
            return None
        operands = self._operands(inputs)
        count = len(inputs) + OPERAND_TENSORS * len(operands)
        stand_ins = stand_ins_of(tensors[:count])
        record: list[Saved] = []
        made: list[Any] = []

        def python() -> tuple[Tensors, Tensors]:
            read: list[Any] = stand_ins[: len(inputs)]
            for k, i in enumerate(operands):
                first = len(inputs) + OPERAND_TENSORS * k
                read[i] = operands_like(inputs[i], stand_ins[first : first + OPERAND_TENSORS])
            for i in self._fp8_weights:  # their codes and scales are direct inputs
                read[i] = inputs[i]
            values = self._values(plan, read)
            record.extend(run_forward(plan, values, self.start, self.stop))
            made.extend([waited(values[v]) for v in self.makes])
            return flatten_values(made), [t for saved in record for t in saved.tensors]

        recorded = self.record(plan, tensors[:count], stand_ins, tensors[count:], python)
        if isinstance(recorded, str):
            self.refused = recorded
            return None
        self._results = _unflattening(reader_of(recorded.results), made)
        slots = sorted({place.slot for place in recorded.saved if place is not None})
        self._saved = reader(slots)
        self._trace = Trace(self, len(slots), None)
        index = {slot: i for i, slot in enumerate(slots)}
        places = iter([p if p is None else p._replace(slot=index[p.slot]) for p in recorded.saved])
        self._stages = [([next(places) for _ in saved.tensors], saved.facts) for saved in record]
        self.recorded = recorded  # last: other threads run the recording as soon as it is here
        return recorded

    def backward(
        self,
        plan: CallPlan,
        grads: Sequence[Any],
        buffers: list[torch.Tensor | None],
        targets: Targets,
        state: Tensors = (),
    ) -> list[Any]:
        """Run the backward of a forward that ran from a recording; from a recording, if possible.

        Args:
            plan: the plan of the forward.
            grads: gradients of the values that the segment made.
            buffers: saved by the forward. The list is emptied, except (with `overlaps`) for buffers
                that the first step's task reads. A tensor is freed when its last reader has run.
            targets: targets of weight gradients.
            state: see `forward`.

        Returns:
            Gradients of the values that it reads, and of its parameters; with `overlaps` followed
            by what `backward_data` of the first step hands to its `backward_params`.
        """
        inputs = flatten_values(grads) if Operands in [type(grad) for grad in grads] else [*grads]
        saved = slice(len(inputs), len(inputs) + len(buffers))
        inputs += [*buffers, *state]
        key: tuple[Any, ...] = tuple([grad is None for grad in grads])
        if plan.in_tf32:
            key = (*key, "tf32")
        own_targets: Targets = {}
        if targets:
            own_targets = {i: t for i, t in targets.items() if self.start <= i < self.stop}
            inputs += [t.main_grad for t in own_targets.values()]
            key = (*key, *[t.mode for t in own_targets.values()])
        found = self.backwards.get(key)
        if found is None:
            found = self._record_backward(plan, inputs, grads, own_targets)
            self.backwards[key] = found
        own = {p.slot for p in self._stages[0][0] if p is not None} if self.overlaps else ()
        buffers[:] = [t if i in own else None for i, t in enumerate(buffers)] if own else []
        if not isinstance(found, str):
            recorded, results_of = found
            memory = recorded.run(inputs)
            if memory is not None:
                recorded.count_call()
                return list(results_of(memory))
        record = self.saved_views(inputs[saved], own_targets)
        inputs.clear()
        return self._backward_by_stages(self.bound(plan, state), grads, record)

    def _backward_by_stages(
        self, plan: CallPlan, made_grads: Sequence[Any], record: list[Saved]
    ) -> list[Any]:
        grads: list[Any] = [None] * len(plan.chain.names)
        for v, grad in zip(self.makes, made_grads, strict=True):
            grads[v] = grad
        task = run_backward(plan, grads, record, self.start, self.stop)
        carry = [None if task is None else task.carry] if self.overlaps else []
        return [*[waited(grads[v]) for v in self.reads], *grads[self.parameters], *carry]

    def add_results(self, grads: list[Any], results: Sequence[Any]) -> None:
        """Add the gradients that `backward` returned to the gradients of all values."""
        count = len(self.reads)
        for v, grad in zip(self.reads, results, strict=False):
            grads[v] = add_grads(grads[v], grad)
        parameters = self.parameters.stop - self.parameters.start
        grads[self.parameters] = results[count : count + parameters]

    def saved_views(self, buffers: Any, targets: Targets, stages: int | None = None) -> list[Saved]:
        """What the stages saved, or the first ones, as views into the buffers of the forward."""
        return [
            Saved(
                tuple([p if p is None else p.within(buffers[p.slot]) for p in places]),
                facts,
                targets.get(i),
            )
            for i, (places, facts) in enumerate(self._stages[:stages], self.start)
        ]

    def readings(self) -> list[list[Reading]]:
        """For each buffer that a recorded forward saves, the tensors in it that backward reads."""
        found: list[list[Reading]] = [[] for _ in range(self._trace.tensors)]
        for place in [p for places, _ in self._stages for p in places if p is not None]:
            found[place.slot].append(Reading(*place[1:5]))
        return found

    def _record_backward(
        self, plan: CallPlan, inputs: Tensors, grads: Sequence[Any], targets: Targets
    ) -> tuple[Recorded, _Reader] | str:
        stand_ins = stand_ins_of(inputs)
        first, end = len(flatten_values(grads)), len(inputs)
        if plan.state is not None:
            end -= len(plan.state)
            stand_ins[end:] = plan.state
        last = end - len(targets)
        main_grads = zip(targets.items(), stand_ins[last:end], strict=True)
        targets = {i: target._replace(main_grad=t) for (i, target), t in main_grads}
        record = self.saved_views(stand_ins[first:last], targets)
        results: list[Any] = []

        def python() -> tuple[Tensors, Tensors]:
            made_grads = unflatten_values(stand_ins[:first], grads)
            found = self._backward_by_stages(plan, made_grads, record)
            reads = len(self.reads)
            needs = plan.needs[self.parameters]
            carry = found[reads + len(needs) :]
            parameters = zip(found[reads : reads + len(needs)], needs, strict=True)
            needed = [grad if need else None for grad, need in parameters]
            results.extend([*found[:reads], *needed, *carry])
            return flatten_values(results), ()

        if plan.state is not None:
            recorded = recording.record(inputs, stand_ins, (), [], python)
        else:
            recorded = self.record(plan, inputs, stand_ins, (), python)
        if isinstance(recorded, str):
            return recorded
        return recorded, _unflattening(reader_of(recorded.results, BufferSlice.view_of), results)


def _unflattening(read: _Reader, like: Sequence[Any]) -> _Reader:
    """A reader that returns operands where `like` has operands; `read` returns tensors alone."""
    structures = [structure_of(x) if type(x) is Operands else None for x in like]
    if not any(structures):
        return read
    return lambda buffers: unflatten_values(read(buffers), structures)


def reader_of(
    places: Sequence[BufferSlice | None],
    read: Callable[[BufferSlice, torch.Tensor], torch.Tensor] = BufferSlice.within,
) -> _Reader:
    """A function that takes these tensors out of the buffers of a recorded call."""
    if all(place is not None and place.whole for place in places):
        return reader([place.slot for place in places])  # type: ignore[union-attr]
    return lambda buffers: [
        None if place is None else read(place, buffers[place.slot])  # type: ignore[arg-type]
        for place in places
    ]
