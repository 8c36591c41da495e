"""Exchange of tensors between the ranks of a group: a step of a ring, and collectives of stacks.

A stack is `[ranks, ...]`: one tensor for each rank of the group, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.pytorch.parallel.collectives import gather_into, scatter_into


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


def send_to_next(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, reverse: bool = False
) -> PendingReceive:
    """Send tensors to the next rank of a ring, and receive those of the previous rank.

    Args:
        tensors: of equal sizes on all ranks.
        group: the ring.
        reverse: send to the previous rank and receive from the next one.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    step = -1 if reverse else 1
    to, source = (dist.get_global_rank(group, (rank + way) % ranks) for way in (step, -step))
    sent = [x.contiguous() for x in tensors]
    received = [torch.empty_like(x) for x in sent]
    ops = [dist.P2POp(dist.isend, x, to, group) for x in sent]
    ops += [dist.P2POp(dist.irecv, x, source, group) for x in received]
    return PendingReceive(received, dist.batch_isend_irecv(ops), sent)


def all_gather_stack(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`[ranks, ...]`: the tensors of all ranks, of equal shapes."""
    x = x.contiguous()
    stack = x.new_empty((dist.get_world_size(group), *x.shape))
    gather_into(stack.flatten(0, 1), x, group=group)
    return stack


def reduce_scatter_stack(stack: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Entry r of `[ranks, ...]`, summed over all ranks, where r is this rank."""
    stack = stack.contiguous()
    own = torch.empty_like(stack[0])
    scatter_into(own, stack.flatten(0, 1), group=group)
    return own


def all_to_all_stack(stack: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send entry r of `[ranks, ...]` to rank r; entry r of the result comes from rank r."""
    stack = stack.contiguous()
    received = torch.empty_like(stack)
    dist.all_to_all_single(received, stack, group=group)
    return received
