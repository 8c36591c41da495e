"""The backward of a segment in two recordings.

The first gives the gradient of the input; the second the gradients of the first step's parameters,
while the collective that has made the input runs backward, or when they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch.chain import recording
from transformer_engine.pytorch.chain.chain import Targets
from transformer_engine.pytorch.chain.gemm import count_group
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.recording import Tensors
from transformer_engine.pytorch.chain.segment import Segment, reader_of
from transformer_engine.pytorch.chain.stage_by_stage import Unfinished
from transformer_engine.pytorch.chain.stages.base import Saved
from transformer_engine.pytorch.fp8.operands import Operands, built, flat
from transformer_engine.pytorch.parallel.collectives import waited

Buffers = list[torch.Tensor | None]


class FirstParameters(Unfinished):
    """`Unfinished` of the first step of a segment that was recorded.

    Args:
        segment: that `overlaps`.
        plan: of the call.
        grads: of all values.
        carry: of the step's `backward_data`.
        buffers: what the forward of the segment left.
        targets: of weight gradients.
        restored: the segment's input, see `Stage.restore`.
    """

    def __init__(
        self,
        segment: Segment,
        plan: CallPlan,
        grads: list[Any],
        carry: Operands,
        buffers: Buffers,
        targets: Targets,
        restored: Any,
    ) -> None:
        super().__init__(plan, grads, segment.start, carry, Saved(()), restored)
        self.segment = segment
        self.buffers = buffers
        self.target = targets.get(segment.start)

    def gradients(self) -> Sequence[Any]:
        """Compute them now, from a recording where that can be."""
        like = [self.carry, Operands(None, waited(self.restored))]
        main = [] if self.target is None else [self.target.main_grad]
        inputs = (*flat(like), *self.buffers, *main)
        how = None if self.target is None else self.target.how
        key = ("parameters", how, self.plan.in_tf32)
        backwards = self.segment.backwards
        found = backwards.get(key)
        if found is None:
            found = backwards[key] = self._record(inputs, like)
        if not isinstance(found, str):
            recorded, results_of = found
            memory = recorded.run(inputs)
            if memory is not None:
                count_group(recorded.gemms)
                grads: Sequence[Any] = results_of(memory)
                return grads
        return self._by_stage(like, self._saved(self.buffers, self.target))

    def _saved(self, buffers: Tensors, target: Any) -> Saved:
        return self.segment.views(buffers, {} if target is None else {self.number: target})[0]

    def _by_stage(self, read: Sequence[Any], saved: Saved) -> Sequence[Any]:
        plan, i = self.plan, self.number
        carry, again = read
        saved = saved._replace(restored=again.columnwise)
        return plan.chain.steps[i].stage.backward_params(carry, saved, plan.stage_plans[i])

    def _record(self, inputs: Tensors, like: Sequence[Any]) -> Any:
        ours = recording.stand_ins(inputs)
        first, last = len(flat(like)), len(ours) - (self.target is not None)
        target = None if self.target is None else self.target._replace(main_grad=ours[last])
        read, saved = built(ours[:first], like), self._saved(ours[first:last], target)

        def python() -> tuple[Tensors, Tensors]:
            grads = self._by_stage(read, saved)
            needs = self.plan.needs[self.plan.chain.steps[self.number].parameters]
            needed = zip(grads, needs, strict=True)
            return [grad if need else None for grad, need in needed], ()

        recorded = self.segment.watch(self.plan, inputs, ours, (), python)
        return recorded if isinstance(recorded, str) else (recorded, reader_of(recorded.results))


def backward_with(
    segment: Segment,
    plan: CallPlan,
    grads: list[Any],
    made: Sequence[Any],
    buffers: Buffers,
    targets: Targets,
    restored: Any,
) -> Unfinished | None:
    """The backward of a segment that `overlaps`.

    Args:
        segment: that was recorded.
        plan: of the call.
        grads: of all values; those of what it reads, and of its parameters, are put there.
        made: of the values that it made.
        buffers: what its forward left.
        targets: of weight gradients.
        restored: its input, see `Stage.restore`.

    Returns:
        What is left to do once the collective has started.
    """
    *results, carry = segment.backward(plan, made, buffers, targets)
    segment.put(grads, results)
    if carry is None:
        return None
    return FirstParameters(segment, plan, grads, carry, buffers, targets, restored)
