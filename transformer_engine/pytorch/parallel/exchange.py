"""Tensors that pass between ranks of a group, started now and awaited later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.pytorch.parallel.collectives import gather_into, scatter_into


class Coming:
    """Tensors that another rank sends.

    Args:
        tensors: filled when `wait` returns.
        works: of torch.distributed.
        sent: what must not be changed until then.
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
    step = -1 if back else 1
    to, source = (dist.get_global_rank(group, (rank + way) % ranks) for way in (step, -step))
    sent = [x.contiguous() for x in tensors]
    come = [torch.empty_like(x) for x in sent]
    ops = [dist.P2POp(dist.isend, x, to, group) for x in sent]
    ops += [dist.P2POp(dist.irecv, x, source, group) for x in come]
    return Coming(come, dist.batch_isend_irecv(ops), sent)


def gather_stack(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`[ranks, ...]`: the tensors of all ranks, of equal shapes."""
    x = x.contiguous()
    stack = x.new_empty((dist.get_world_size(group), *x.shape))
    gather_into(stack.flatten(0, 1), x, group=group)
    return stack


def sum_own(stack: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over all ranks of the part of `[ranks, ...]` that is this rank's."""
    stack = stack.contiguous()
    own = torch.empty_like(stack[0])
    scatter_into(own, stack.flatten(0, 1), group=group)
    return own


def swap_stack(stack: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`[ranks, ...]`: part i goes to rank i; what comes is in the order of ranks, too."""
    stack = stack.contiguous()
    come = torch.empty_like(stack)
    dist.all_to_all_single(come, stack, group=group)
    return come
