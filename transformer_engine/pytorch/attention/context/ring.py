"""p2p: ring attention. Keys and values pass round a ring of ranks; queries stay on their rank.

In step i of the forward rank r computes with the keys of rank r - i and receives those of rank
r - i - 1. It saves the keys of the last step. The backward runs the steps in reverse: it begins
with these keys, sends keys the other way round, and ends with the rank's own keys.

The gradient of a block of keys is passed on behind the keys: each rank adds its share and sends the
sum on, and the sum of the others reaches the owner of the keys during the last step. These sums are
fp32. In a ring of two there is nothing to add on the way: gradients are sent in their own dtype,
which is fp32 in FP8 attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from transformer_engine.pytorch.attention.backends.backend import Backend, Gradients, Needs, Saved
from transformer_engine.pytorch.attention.context.attend import (
    Backward,
    KeyValues,
    attend,
    with_saved_tensors,
)
from transformer_engine.pytorch.attention.context.codes import with_casts
from transformer_engine.pytorch.attention.context.lengths import UNIT
from transformer_engine.pytorch.attention.context.merging import GradSum
from transformer_engine.pytorch.attention.context.parts import RankCall
from transformer_engine.pytorch.attention.context.score_blocks import chunks_of_rank
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.parallel.exchange import PendingReceive, send_to_next


class _Ring:
    """A call on one rank of the ring.

    Attributes:
        last: keys and values of the last step, once `forward_steps` has ended.
    """

    last: Sequence[torch.Tensor] = ()

    def __init__(self, call: Call) -> None:
        context, shape = call.context, call.shape
        assert context is not None and context.group is not None
        self.group, self.rank, self.ranks = context.group, context.group_rank, context.group_size
        packed = shape.qkv_format == "thd"
        self.key_length = UNIT if packed else shape.keys // 2
        queries = chunks_of_rank(self.rank, self.ranks, UNIT if packed else shape.queries // 2)
        tokens = (shape.queries, shape.keys)
        self.rank_call = RankCall(call, self.ranks, queries, self.ranks, tokens)

    def forward_steps(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[KeyValues]:
        """All steps. The keys of the next step are received while the caller computes with these.

        Args:
            key: of this rank.
            value: of this rank.
        """
        current: Sequence[torch.Tensor] = (key, value)
        for step in range(self.ranks):
            pending = send_to_next(current, self.group) if step + 1 < self.ranks else None
            yield self.key_values(step, *current)
            if pending is not None:
                self.last = current = pending.wait()

    def reverse_steps(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[KeyValues]:
        """The steps in reverse, without the first, whose keys are this rank's own.

        Args:
            key: of the last step.
            value: of the last step.
        """
        current: Sequence[torch.Tensor] = (key, value)
        for step in range(self.ranks - 1, 0, -1):
            pending = send_to_next(current, self.group, reverse=True) if step > 1 else None
            yield self.key_values(step, *current)
            if pending is not None:
                current = pending.wait()

    def key_values(self, step: int, key: torch.Tensor, value: torch.Tensor) -> KeyValues:
        owner = (self.rank - step) % self.ranks
        chunks, values = chunks_of_rank(owner, self.ranks, self.key_length), self.rank_call.values
        return KeyValues(step, chunks, values(key), values(value))

    def send_grads(
        self, grads: tuple[GradSum, GradSum], previous: PendingReceive | None
    ) -> PendingReceive:
        """Add this rank's gradients of keys and values to those received, and send the sums on."""
        if self.ranks == 2:
            return send_to_next([x.result() for x in grads], self.group, reverse=True)
        sums = [x.in_fp32() for x in grads]
        if previous is not None:
            sums = [x.add_(other) for x, other in zip(sums, previous.wait(), strict=True)]
        return send_to_next(sums, self.group, reverse=True)


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, needs: Needs
) -> tuple[torch.Tensor, Saved | None]:
    """See `backends/__init__.py`."""
    ring = _Ring(call)
    steps = ring.forward_steps(key, value)
    out, saved = attend(ring.rank_call, steps, (query, key, value), needs)
    if saved is None:
        return out, None
    return out, saved._replace(tensors=(*saved.tensors, *ring.last))


def backward(grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
    """See `backends/__init__.py`."""
    ring = _Ring(with_saved_tensors(call, saved))
    steps = Backward(ring.rank_call, grad, saved, needs)
    pending = None
    for step in ring.reverse_steps(*saved.tensors[-2:]):
        pending = ring.send_grads(steps.run(step), pending)
    assert pending is not None, "a ring has two ranks or more"
    own_grads = steps.run(ring.key_values(0, *saved.tensors[1:3]))
    return steps.gradients(*pending.read([own.plus for own in own_grads]))


BACKEND = Backend("p2p", *with_casts(forward, backward), keeps_scores=True, requirements=())
