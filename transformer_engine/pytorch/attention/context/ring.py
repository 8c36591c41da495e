"""p2p: ring attention. Keys and values pass round a ring of ranks; queries stay on their rank.

In step i of the forward, rank r computes with the keys of rank r - i, and receives the keys of rank
r - i - 1 meanwhile. It saves the keys of the last step. The backward runs the steps in reverse: it
begins with these keys, sends keys the other way round, and ends with the rank's own keys.

The gradients that a rank has computed for the keys of another rank are sent straight to that rank
during the next step. The owner of the keys sums the gradients of all ranks in fp32.
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
from transformer_engine.pytorch.attention.context.parts import AttentionPart, RankCall
from transformer_engine.pytorch.attention.context.score_blocks import Chunks, chunks_of_rank
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.parallel.exchange import (
    PendingReceive,
    SummandExchange,
    send_to_next,
)
from transformer_engine.pytorch.parallel.peer_memory import (
    device_in_ring,
    peer_memory,
    peer_tensors,
)


class _Ring:
    """A call on one rank of the ring.

    Attributes:
        last: keys and values of the last step, once `forward_steps` has ended.
    """

    last: Sequence[torch.Tensor] = ()

    def __init__(self, call: Call, like: torch.Tensor) -> None:
        context, shape = call.context, call.shape
        assert context is not None and context.group is not None
        self.group, self.rank, self.ranks = context.group, context.group_rank, context.group_size
        packed = shape.qkv_format == "thd"
        self.key_length = UNIT if packed else shape.keys // 2
        queries = chunks_of_rank(self.rank, self.ranks, UNIT if packed else shape.queries // 2)
        tokens = (shape.queries, shape.keys)
        device = device_in_ring(like, self.group)
        self.rank_call = RankCall(call, self.ranks, queries, self.ranks, tokens, device)

    def forward_steps(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[KeyValues]:
        """All steps, the first with the keys and values of this rank.

        While the caller computes with one step's keys, the next ones are received.
        """
        for step, found in enumerate(self._pass_round((key, value), self.ranks, keep=True)):
            yield self.key_values(step, *found)

    def reverse_steps(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[KeyValues]:
        """The steps in reverse, from the keys and values of the forward's last step.

        The first step of the forward is left out: its keys are this rank's own.
        """
        steps = range(self.ranks - 1, 0, -1)
        found = self._pass_round((key, value), len(steps), reverse=True)
        for step, tensors in zip(steps, found, strict=True):
            yield self.key_values(step, *tensors)

    def _pass_round(
        self,
        tensors: Sequence[torch.Tensor],
        steps: int,
        reverse: bool = False,
        keep: bool = False,
    ) -> Iterator[Sequence[torch.Tensor]]:
        """The tensors of each step, which the caller reads before it asks for the next ones.

        With `reverse` they come from the next rank, not from the previous one. With `keep` those of
        the last step become `last`.
        """
        lent: Sequence[PendingReceive] = ()
        for step in range(1, steps):
            pending = send_to_next(tensors, self.group, reverse, turn=(step - 1) * len(tensors))
            yield tensors
            tensors = [one.lend() for one in pending]
            for one in lent:  # the tensors of the step before have been read, and sent
                one.release()
            lent = pending
            for one in lent if keep and step + 1 == steps else ():
                one.start_copy()
        if steps > 0:
            yield tensors
        if lent and keep:
            self.last = [one.keep() for one in lent]
            return
        for one in lent:
            one.release()

    def key_chunks(self, step: int) -> Chunks:
        """The chunks of keys that this rank has in a step of the forward."""
        owner = (self.rank - step) % self.ranks
        return chunks_of_rank(owner, self.ranks, self.key_length)

    def key_values(self, step: int, key: torch.Tensor, value: torch.Tensor) -> KeyValues:
        return KeyValues(step, self.key_chunks(step), key, value)

    def send_grads(self, grads: Sequence[GradSum], step: int, sums: SummandExchange) -> None:
        """Send gradients of keys and values to their owner."""
        owner, source = ((self.rank + way * step) % self.ranks for way in (-1, 1))
        sums.send([grad.result() for grad in grads], owner, source)


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, needs: Needs
) -> tuple[torch.Tensor, Saved | None]:
    """See `backends/__init__.py`."""
    ring = _Ring(call, query)
    steps = ring.forward_steps(key, value)
    out, saved = attend(ring.rank_call, steps, (query, key, value), needs)
    if saved is None:
        return out, None
    return out, saved._replace(tensors=(*saved.tensors, *ring.last))


def backward(grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
    """See `backends/__init__.py`."""
    ring = _Ring(with_saved_tensors(call, saved), grad)
    steps = Backward(ring.rank_call, grad, saved, needs)
    sums = SummandExchange(ring.group)
    for step in ring.reverse_steps(*saved.tensors[-2:]):
        ring.send_grads(steps.run(step), step.step, sums)
    own_grads = steps.run(ring.key_values(0, *saved.tensors[1:3]))
    return steps.gradients(*sums.results([grad.result() for grad in own_grads]))


def parts(query: torch.Tensor, call: Call) -> Iterator[AttentionPart]:
    """The parts that the forward will run; nothing is sent."""
    ring = _Ring(call, query)
    for step in range(ring.ranks):
        yield from ring.rank_call.parts(ring.key_chunks(step))


def reserve_memory(query: torch.Tensor, call: Call, needs: bool) -> None:
    """Allocate the peer memory of a call before it is recorded. All ranks of the ring call this.

    `needs` says whether a backward will follow. Without one no memory for gradients is allocated;
    the call is recorded only if there is some already.
    """
    context, shape = call.context, call.shape
    assert context is not None
    if not _is_plain(call):
        return
    tokens, heads = (shape.batch or 1) * shape.keys, shape.groups
    count = tokens * heads * max(shape.key_size, shape.value_size) * query.element_size()
    peer_memory(context.group, query.device, count, ring=True)
    if needs:
        peer_memory(context.group, query.device, count)


def _is_plain(call: Call) -> bool:
    return call._replace(context=None).is_plain and call.shape.band is not None


def _peer_tensors(call: Call) -> tuple[torch.Tensor, ...]:
    context = call.context
    assert context is not None
    return (*peer_tensors(context.group, ring=True), *peer_tensors(context.group))


def _recordable(call: Call) -> bool:
    """Whether all tensors that the ring sends pass through peer memory."""
    return _is_plain(call) and len(_peer_tensors(call)) == _RECORDED


_RECORDED = 4  # two tensors of the peer memory for keys and values, two of that for gradients

BACKEND = Backend(
    "p2p",
    *with_casts(forward, backward),
    keeps_scores=True,
    requirements=(),
    recordable=_recordable,
    records_on=("cuda",),
    persistent=_peer_tensors,
)
