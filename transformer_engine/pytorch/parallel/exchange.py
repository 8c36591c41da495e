"""Exchange of tensors between the ranks of a group: a step of a ring, and collectives of stacks.

A stack is `[ranks, ...]`: one tensor for each rank of the group, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from transformer_engine.pytorch.parallel.collectives import all_gather, all_to_all, reduce_scatter
from transformer_engine.pytorch.parallel.peer_memory import PeerMemory, peer_memory

T = TypeVar("T")


class PendingReceive:
    """Tensors that another rank is sending.

    Args:
        tensors: filled when `wait` returns.
        works: handles of torch.distributed.
        sent: the tensors that this rank sends meanwhile; held until `wait`, must not be changed.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], works: list[Any], sent: Sequence[torch.Tensor]
    ) -> None:
        self._tensors, self._works, self._sent = tensors, works, sent

    def wait(self) -> Sequence[torch.Tensor]:
        """The tensors, on the current stream; the host waits where the backend is gloo."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], ()
        return self._tensors

    def read(self, functions: Sequence[Callable[[torch.Tensor], T]]) -> list[T]:
        """What each function returns of its tensor. The tensors may not be used afterwards."""
        pairs = zip(functions, self.wait(), strict=True)
        return [function(x) for function, x in pairs]


class _PeerTensor:
    """A tensor that another rank writes to peer memory.

    Args:
        x: the tensor that this rank sends meanwhile, of the same shape and dtype.
        memory: peer memory of the ring.
        to: the receiver of `x`.
        source: the sender.
    """

    def __init__(self, x: torch.Tensor, memory: PeerMemory, to: int, source: int) -> None:
        self._sent: torch.Tensor | None = x
        self._source = source
        self._copy: torch.Tensor | None = None
        self._transfer = memory.start(self)
        self._transfer.send(to, x)

    def wait(self) -> torch.Tensor:
        """A copy, which also frees the peer memory."""
        if self._copy is None:
            self._copy = self.read(torch.clone)
        return self._copy

    def read(self, function: Callable[[torch.Tensor], T]) -> T:
        """What a function returns of the tensor, which it may not keep."""
        if self._copy is not None:  # a later transfer has waited for this one
            return function(self._copy)
        sent, self._sent = self._sent, None
        assert sent is not None, "a tensor is read once"
        (result,) = [function(x) for _, x in self._transfer.receive(sent, [self._source])]
        return result


class _PeerReceive(PendingReceive):
    """Tensors that another rank writes to peer memory."""

    def __init__(self, pending: Sequence[_PeerTensor]) -> None:
        self._pending = pending

    def wait(self) -> Sequence[torch.Tensor]:
        return [one.wait() for one in self._pending]

    def read(self, functions: Sequence[Callable[[torch.Tensor], T]]) -> list[T]:
        pairs = zip(functions, self._pending, strict=True)
        return [one.read(function) for function, one in pairs]


def send_to_next(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, reverse: bool = False
) -> PendingReceive:
    """Send tensors to the next rank of a ring, and receive those of the previous rank.

    Copy engines move large tensors where the ranks share a host, so that kernels do not wait.

    Args:
        tensors: of equal sizes on all ranks.
        group: the ring.
        reverse: send to the previous rank and receive from the next one.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    step = -1 if reverse else 1
    to, source = ((rank + way) % ranks for way in (step, -step))
    sent = [x.contiguous() for x in tensors]
    memory = peer_memory(group, sent[0].device, max([x.nbytes for x in sent]), ring=True)
    if memory is not None:
        return _PeerReceive([_PeerTensor(x, memory, to, source) for x in sent])
    to, source = (dist.get_global_rank(group, one) for one in (to, source))
    received = [torch.empty_like(x) for x in sent]
    ops = [dist.P2POp(dist.isend, x, to, group) for x in sent]
    ops += [dist.P2POp(dist.irecv, x, source, group) for x in received]
    return PendingReceive(received, dist.batch_isend_irecv(ops), sent)


def all_gather_stack(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`[ranks, ...]`: the tensors of all ranks, of equal shapes."""
    stack: torch.Tensor = all_gather(x.contiguous().unsqueeze(0), group).wait()
    return stack


def reduce_scatter_stack(stack: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Entry r of `[ranks, ...]`, summed over all ranks, where r is this rank."""
    own: torch.Tensor = reduce_scatter(stack.contiguous(), group).wait()
    return own.squeeze(0)


def all_to_all_stack(stack: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send entry r of `[ranks, ...]` to rank r; entry r of the result comes from rank r."""
    return all_to_all(stack.contiguous(), group)
