"""The backward of a segment in two recordings.

The first computes the gradient of the segment's input. The second computes the gradients of the
first step's parameters: while the collective before the segment runs backward, or in `backward_dw`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformer_engine.pytorch.chain.chain import Targets
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.segment import Segment, reader_of
from transformer_engine.pytorch.chain.stage import Saved
from transformer_engine.pytorch.chain.stage_by_stage import ParamGradTask
from transformer_engine.pytorch.chain.stand_ins import Buffers, Tensors, stand_ins_of
from transformer_engine.pytorch.fp8.casts.operands import Operands, flatten_values, unflatten_values
from transformer_engine.pytorch.parallel.collectives import lent, release


class RecordedParamGradTask(ParamGradTask):
    """`ParamGradTask` of the first step of a segment whose forward ran from a recording.

    Args:
        segment: a segment whose `overlaps` is set.
        plan: the plan of the call.
        grads: gradients of all values.
        carry: returned by `backward_data` of the step.
        buffers: buffers that the forward of the segment saved: at least those that the step reads.
        targets: targets of weight gradients.
        regathered: the segment's input, see `Stage.regather`; it may be pending.
    """

    def __init__(
        self,
        segment: Segment,
        plan: CallPlan,
        grads: list[Any],
        carry: Operands,
        buffers: Buffers,
        targets: Targets,
        regathered: Any,
    ) -> None:
        super().__init__(plan, grads, segment.start, carry, Saved(()), regathered)
        self.segment = segment
        self.buffers = buffers
        self.target = targets.get(segment.start)

    def gradients(self) -> Sequence[Any]:
        """Compute the gradients, from a recording if possible."""
        grads = self._gradients([self.carry, Operands(None, lent(self.input_again))])
        release(self.input_again)
        return grads

    def _gradients(self, like: Sequence[Any]) -> Sequence[Any]:
        main = [] if self.target is None else [self.target.main_grad]
        inputs = [*flatten_values(like), *self.buffers, *main]
        mode = None if self.target is None else self.target.mode
        key = ("parameters", mode, self.plan.in_tf32)
        backwards = self.segment.backwards
        found = backwards.get(key)
        if found is None:
            found = backwards[key] = self._record(inputs, like)
        if not isinstance(found, str):
            recorded, results_of = found
            memory = recorded.run(inputs)
            if memory is not None:
                recorded.count_call()
                return results_of(memory)
        return self._by_stage(like, self._saved(self.buffers, self.target))

    def _saved(self, buffers: Tensors, target: Any) -> Saved:
        targets = {} if target is None else {self.number: target}
        return self.segment.saved_views(buffers, targets, 1)[0]

    def _by_stage(self, read: Sequence[Any], saved: Saved) -> Sequence[Any]:
        plan, i = self.plan, self.number
        carry, regathered = read
        saved = saved._replace(input_again=regathered.columnwise)
        return plan.chain.steps[i].stage.backward_params(carry, saved, plan.stage_plans[i])

    def _record(self, inputs: Tensors, like: Sequence[Any]) -> Any:
        stand_ins = stand_ins_of(inputs)
        first, last = len(flatten_values(like)), len(stand_ins) - (self.target is not None)
        target = None if self.target is None else self.target._replace(main_grad=stand_ins[last])
        read = unflatten_values(stand_ins[:first], like)
        saved = self._saved(stand_ins[first:last], target)

        def python() -> tuple[Tensors, Tensors]:
            grads = self._by_stage(read, saved)
            needs = self.plan.needs[self.plan.chain.steps[self.number].parameters]
            needed = zip(grads, needs, strict=True)
            return [grad if need else None for grad, need in needed], ()

        recorded = self.segment.record(self.plan, inputs, stand_ins, (), python)
        return recorded if isinstance(recorded, str) else (recorded, reader_of(recorded.results))


def overlapped_backward(
    segment: Segment,
    plan: CallPlan,
    grads: list[Any],
    made: Sequence[Any],
    buffers: Buffers,
    targets: Targets,
    regathered: Any,
) -> ParamGradTask | None:
    """Run the backward of a segment with `overlaps`, without the first step's parameter gradients.

    Args:
        segment: the segment, whose forward ran from a recording.
        plan: the plan of the call.
        grads: gradients of all values, to which the results are added.
        made: gradients of the values that the segment made.
        buffers: the buffers that the forward of the segment saved.
        targets: targets of weight gradients.
        regathered: the segment's input, see `Stage.regather`; it may be pending.

    Returns:
        The task of the first step, to be run once the collective has started.
    """
    *results, carry = segment.backward(plan, made, buffers, targets)
    segment.add_results(grads, results)
    if carry is None:
        return None
    return RecordedParamGradTask(segment, plan, grads, carry, buffers, targets, regathered)
