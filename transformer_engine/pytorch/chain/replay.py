"""Replays: a chain's forward and backward of one run and shape, as tapes (see tape.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from transformer_engine.pytorch.chain.gemm import count_group
from transformer_engine.pytorch.chain.stages.base import Run, Saved
from transformer_engine.pytorch.chain.tape import Memory, Place, Tape, record, stand_ins

Tensors = Sequence[torch.Tensor | None]
Gradients = Sequence[torch.Tensor | None]

# From here on kernels take longer than the host, and stages need less memory: each asks for its
# own when its turn comes.
_MOST_BYTES = 256 * 1024 * 1024


class Replay:
    """What a chain does for one run and one shape of its input.

    The forward is recorded at once. A backward is recorded when it first runs; where it has no
    tape, the stages run one by one on what the forward's tape kept.
    """

    __slots__ = ("_backwards", "_stages", "gemms", "kept", "result", "run")

    def __init__(self, tape: Tape, stages: list[tuple[list[Place | None], Any]]) -> None:
        self.run = tape.run  # the forward: from its inputs to its memory, see `Tape`
        self.gemms = tape.gemms
        slots = sorted({place.slot for places, _ in stages for place in places if place})
        self.result = itemgetter(*tape.results)  # of that memory: what the chain returns
        self.kept = _several(slots)  # and what backward reads
        index = {slot: i for i, slot in enumerate(slots)}
        self._stages = [
            ([p if p is None else p._replace(slot=index[p.slot]) for p in places], facts)
            for places, facts in stages
        ]
        self._backwards: dict[tuple[bool, bool], Tape | None] = {}

    @classmethod
    def of(
        cls, run: Run, inputs: tuple[torch.Tensor | None, ...], parameters: Tensors
    ) -> Replay | None:
        """Record the forward; None where it has no tape.

        Args:
            run: of a chain.
            inputs: the input, the parameters (None for weights kept in FP8), what these consist
                of, and what stages have cached.
            parameters: as stages take them.
        """
        chain = run.chain
        if inputs[0] is None or inputs[0].nbytes > _MOST_BYTES // 4:
            return None
        stages: list[Saved] = []
        count = len(run.needs)
        ours = stand_ins(inputs[:count])
        values = list(ours)
        for i in run.kept:
            values[i] = parameters[i - 1]  # its codes and scales are given

        def forward() -> tuple[Sequence[Any], Sequence[Any]]:
            result, saved = chain.forward_by_stages(values[0], values[1:], run)
            stages.extend(saved)
            tensors = [t for one in saved for t in one.tensors]
            return result if chain.has_tap else (result,), tensors

        recorded = record(inputs[:count], ours, inputs[count:], forward)
        if recorded is None or recorded[0].memory > _MOST_BYTES:
            return None
        tape, places = recorded
        rest = iter(places)
        return cls(tape, [([next(rest) for _ in one.tensors], one.facts) for one in stages])

    def backward(
        self,
        run: Run,
        grads: tuple[torch.Tensor | None, torch.Tensor | None],
        kept: Tensors,
    ) -> Gradients:
        """Gradients of the input and of every parameter, from those of the result and the tap."""
        key = (grads[0] is None, grads[1] is None)
        if key not in self._backwards:
            self._backwards[key] = self._record_backward(run, grads, kept)
        tape = self._backwards[key]
        if tape is not None:
            memory = tape.run((*grads, *kept))
            if memory is not None:
                count_group(tape.gemms)
                return [None if slot is None else memory[slot] for slot in tape.results]
        return run.chain.backward_by_stages(grads[0], self._saved(kept, grads[1]), run)

    def _saved(self, kept: Tensors, tap_grad: torch.Tensor | None) -> list[Saved]:
        """What each stage saved, as views into what was kept."""
        saved: list[Saved] = []
        for places, facts in self._stages:
            tensors = [None if p is None else p.within(kept[p.slot]) for p in places]  # type: ignore[arg-type]
            saved.append(Saved(tuple(tensors), facts, tap_grad))
            tap_grad = None  # the first stage's alone
        return saved

    def _record_backward(
        self,
        run: Run,
        grads: tuple[torch.Tensor | None, torch.Tensor | None],
        kept: Tensors,
    ) -> Tape | None:
        inputs = [*grads, *kept]
        ours = stand_ins(inputs)
        saved = self._saved(ours[2:], ours[1])
        recorded = record(
            inputs, ours, (), lambda: (run.chain.backward_by_stages(ours[0], saved, run), ())
        )
        if recorded is None or recorded[0].memory > _MOST_BYTES:
            return None
        return recorded[0]


def _several(slots: Sequence[int]) -> Callable[[Memory], Sequence[torch.Tensor | None]]:
    """A function that takes these slots out of a memory."""
    if len(slots) > 1:
        return itemgetter(*slots)
    return lambda memory: [memory[slot] for slot in slots]
