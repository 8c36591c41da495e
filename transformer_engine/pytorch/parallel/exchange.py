"""Tensors that pass between ranks of a group, started now and awaited later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.pytorch.parallel.peer_memory import PeerMemory, aligned, peer_memory

# torch 2.13 has other names for these, and warns of the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Coming:
    """Tensors that another rank sends.

    Args:
        sent: what this rank sends meanwhile, of the same sizes and dtypes.
    """

    def __init__(self, sent: Sequence[torch.Tensor]) -> None:
        self._sent: Sequence[torch.Tensor] | None = sent
        self._tensors: Sequence[torch.Tensor] = ()

    def _arrive(self) -> AbstractContextManager[Sequence[torch.Tensor]]:
        raise NotImplementedError

    @contextmanager
    def read(self) -> Iterator[Sequence[torch.Tensor]]:
        """The tensors, for the length of the context, on the current stream."""
        if self._sent is None:
            yield self._tensors
            return
        with self._arrive() as tensors:
            self._sent = None
            yield tensors

    def wait(self) -> Sequence[torch.Tensor]:
        """The tensors, in memory of their own."""
        with self.read() as tensors:
            if not self._tensors:
                self._tensors = [x.clone() for x in tensors]
        return self._tensors


class _Messages(Coming):
    """By torch.distributed."""

    def __init__(
        self, sent: Sequence[torch.Tensor], group: dist.ProcessGroup, to: int, source: int
    ) -> None:
        super().__init__([x.contiguous() for x in sent])
        self._tensors = [torch.empty_like(x) for x in self._sent]  # type: ignore[union-attr]
        peers = [dist.get_global_rank(group, rank) for rank in (to, source)]
        ops = [dist.P2POp(dist.isend, x, peers[0], group) for x in self._sent]  # type: ignore[union-attr]
        ops += [dist.P2POp(dist.irecv, x, peers[1], group) for x in self._tensors]
        self._works = dist.batch_isend_irecv(ops)

    @contextmanager
    def _arrive(self) -> Iterator[Sequence[torch.Tensor]]:
        for work in self._works:
            work.wait()
        yield self._tensors


class _Transferred(Coming):
    """Through peer memory."""

    def __init__(
        self, sent: Sequence[torch.Tensor], memory: PeerMemory, to: int, source: int
    ) -> None:
        super().__init__(sent)
        self._transfer = memory.start(self)
        self._transfer.send(to, *sent)
        self._source = source

    @contextmanager
    def _arrive(self) -> Iterator[Sequence[torch.Tensor]]:
        assert self._sent is not None
        for _, tensors in self._transfer.receive(*self._sent, ranks=(self._source,)):
            yield tensors


def pass_on(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, back: bool = False
) -> Coming:
    """Send tensors to the next rank of a ring, and get those of the previous one.

    Args:
        tensors: of equal sizes on all ranks.
        group: the ring.
        back: the other way round.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    to, source = [(rank + step) % ranks for step in ((-1, 1) if back else (1, -1))]
    count = sum([aligned(x.nbytes) for x in tensors])
    memory = peer_memory(group, tensors[0].device, count)
    if memory is None:
        return _Messages(tensors, group, to, source)
    return _Transferred(tensors, memory, to, source)


def gather_stack(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`[ranks, ...]`: the tensors of all ranks, of equal shapes."""
    x = x.contiguous()
    stack = x.new_empty((dist.get_world_size(group), *x.shape))
    _all_gather(stack.flatten(0, 1), x, group=group)
    return stack


def sum_own(stack: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over all ranks of the part of `[ranks, ...]` that is this rank's."""
    stack = stack.contiguous()
    own = torch.empty_like(stack[0])
    _reduce_scatter(own, stack.flatten(0, 1), group=group)
    return own


def swap_stack(stack: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`[ranks, ...]`: part i goes to rank i; what comes is in the order of ranks, too."""
    stack = stack.contiguous()
    come = torch.empty_like(stack)
    dist.all_to_all_single(come, stack, group=group)
    return come
