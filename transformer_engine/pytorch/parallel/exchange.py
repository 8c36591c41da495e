"""Exchange of tensors between the ranks of a group: a step of a ring, sums, collectives of stacks.

Context parallelism uses these. In a step of a ring each rank sends to the next one. A stack is
`[ranks, ...]`: one tensor for each rank of the group, in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.pytorch.parallel.collectives import (
    Pending,
    all_gather,
    all_to_all,
    reduce_scatter,
    refuse_recording,
)
from transformer_engine.pytorch.parallel.peer_memory import PeerMemory, Transfer, peer_memory


class PendingReceive:
    """A tensor that another rank is sending.

    Args:
        received: the tensor; filled when `wait` returns.
        works: handles of torch.distributed, of this tensor and of others that come with it.
        sent: the tensors that this rank sends meanwhile; they are held until `wait`, and must not
            be changed before.
    """

    def __init__(
        self, received: torch.Tensor, works: list[Any], sent: Sequence[torch.Tensor]
    ) -> None:
        self._received, self._works, self._held = received, works, sent

    def wait(self) -> torch.Tensor:
        """The tensor, on the current stream; the host waits where the backend is gloo."""
        while self._works:
            self._works.pop().wait()
        self._held = ()
        return self._received

    def lend(self) -> torch.Tensor:
        """The tensor as `wait` returns it, to be read before `release` is called."""
        return self.wait()

    def release(self) -> None:
        """The tensor that was lent is no longer read or sent."""

    def start_copy(self) -> None:
        """Start copying the tensor that was lent."""

    def keep(self) -> torch.Tensor:
        """The tensor that was lent, or a copy, for the caller to keep; the memory is released."""
        return self._received


class _PeerTensor(PendingReceive):
    """A tensor that another rank writes to peer memory.

    Args:
        x: the tensor that this rank sends meanwhile, of the same shape and dtype.
        memory: peer memory of the ring.
        to: the receiver of `x`.
        source: the sender.
        slot: the slot of the memory.
    """

    def __init__(
        self, x: torch.Tensor, memory: PeerMemory, to: int, source: int, slot: int
    ) -> None:
        self._sent: torch.Tensor | None = x
        self._source = source
        self._lent: torch.Tensor | None = None
        self._copy: torch.Tensor | None = None
        self._transfer = memory.start(self, slot)
        self._transfer.send(to, x)

    def wait(self) -> torch.Tensor:
        """A copy; the peer memory is free again."""
        if self._copy is None:
            self._copy = self.lend().clone()
            self.release()
        return self._copy

    def lend(self) -> torch.Tensor:
        """The tensor in peer memory, until `release` or `keep` is called."""
        if self._copy is not None:  # a later transfer has waited for this one already
            return self._copy
        sent, self._sent = self._sent, None
        assert sent is not None
        self._lent = self._transfer.borrow(sent, self._source)
        return self._lent

    def release(self) -> None:
        """The peer memory is free again when the current stream has reached this point."""
        if self._lent is not None:
            self._transfer.release(self._source)
            self._lent = None

    def start_copy(self) -> None:
        """Copy what was lent, while the current stream reads it."""
        if self._lent is not None:
            self._copy = torch.empty_like(self._lent)
            self._transfer.start_copy(self._source, self._copy)

    def keep(self) -> torch.Tensor:
        """The copy that `start_copy` has started; the peer memory is free again."""
        assert self._copy is not None
        if self._lent is not None:
            self._transfer.finish(self._copy)
            self.release()
        return self._copy


def send_to_next(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, reverse: bool = False, turn: int = 0
) -> Sequence[PendingReceive]:
    """Send tensors to the next rank of a ring, and receive those of the previous rank.

    Tensors have equal sizes on all ranks. Copy engines move large ones where the ranks share a
    host, so that kernels do not wait. With `reverse` a rank sends to the previous rank and receives
    from the next one. `turn` is how many tensors the call of a ring has sent before these.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    step = -1 if reverse else 1
    to, source = ((rank + way) % ranks for way in (step, -step))
    sent = [x.contiguous() for x in tensors]
    memory = peer_memory(group, sent[0].device, max([x.nbytes for x in sent]), ring=True)
    if memory is not None:
        slots = [(turn + i) % memory.slots for i in range(len(sent))]
        return [_PeerTensor(x, memory, to, source, i) for x, i in zip(sent, slots, strict=True)]
    return _exchange(sent, group, to, source)


class SummandExchange:
    """Sums, one for each rank, of summands that all ranks send to that rank.

    This is a reduce-scatter whose summands become known one after the other, as in the backward of
    ring attention. Summands are added in fp32, and the sum is rounded once, to their dtype. All
    ranks of the group make the same calls in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._transfers: list[Transfer] | None = None
        self._sent: list[torch.Tensor] = []
        self._received: Sequence[PendingReceive] = ()
        self._totals: list[torch.Tensor] = []

    def send(self, summands: Sequence[torch.Tensor], to: int, source: int) -> None:
        """Send summands to the rank `to`, and begin to receive those of the rank `source`.

        Over all calls, each other rank of the group is `to` once and `source` once. There are one
        or two summands, of equal sizes on all ranks and in all calls.
        """
        summands = [x.contiguous() for x in summands]
        if not self._sent:
            count = max([x.nbytes for x in summands])
            memory = peer_memory(self._group, summands[0].device, count)
            if memory is not None:
                self._transfers = [memory.start(self, slot) for slot in range(len(summands))]
        self._sent += summands
        if self._transfers is None:
            self._add_received()
            self._received = _exchange(summands, self._group, to, source)
            return
        for transfer, x in zip(self._transfers, summands, strict=True):
            transfer.send(to, x)

    def results(self, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The sums of this rank with its own summands, after it has sent to all other ranks."""
        if self._transfers is not None:
            in_memory = zip(self._transfers, own, strict=True)
            sums = [transfer.receive_sum(x.contiguous(), None) for transfer, x in in_memory]
            for transfer, x in zip(cycle(self._transfers), self._sent, strict=False):
                transfer.finish(x)
            return sums
        self._add_received()
        return [t.add_(x).to(x.dtype) for t, x in zip(self._totals, own, strict=True)]

    def wait(self) -> None:
        """Called if another collective needs the memory because this exchange was never finished.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("[p2p] the backward of a ring has failed: its ranks cannot go on")

    def _add_received(self) -> None:
        received = [one.wait() for one in self._received]
        if not self._totals:
            self._totals = [torch.zeros_like(x, dtype=torch.float32) for x in received]
        for total, x in zip(self._totals, received, strict=True):
            total.add_(x)


def _exchange(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, to: int, source: int
) -> Sequence[PendingReceive]:
    refuse_recording()
    to, source = (dist.get_global_rank(group, one) for one in (to, source))
    received = [torch.empty_like(x) for x in tensors]
    ops = [dist.P2POp(dist.isend, x, to, group) for x in tensors]
    ops += [dist.P2POp(dist.irecv, x, source, group) for x in received]
    works = list(dist.batch_isend_irecv(ops))
    return [PendingReceive(x, works, tensors) for x in received]


def all_gather_stack(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`[ranks, ...]`: the tensors of all ranks, of equal shapes."""
    return all_gather(x.contiguous().unsqueeze(0), group).wait()


def reduce_scatter_stack(stack: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Entry r of `[ranks, ...]`, summed over all ranks, where r is this rank."""
    own: torch.Tensor = reduce_scatter(stack.contiguous(), group).wait()
    return own.squeeze(0)


def all_to_all_stack(stack: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Send entry r of `[ranks, ...]` to rank r; entry r of the result comes from rank r."""
    return all_to_all(stack.contiguous(), group)
