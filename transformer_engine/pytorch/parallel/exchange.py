"""Tensors that pass between ranks of a group, started now and awaited later."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from transformer_engine.pytorch.parallel.collectives import gather_into, scatter_into


class Coming(NamedTuple):
    """A tensor that another rank sends, and what is under way.

    Attributes:
        tensor: filled when `wait` returns.
        works: of torch.distributed.
        sent: what must not be changed until then.
    """

    tensor: torch.Tensor
    works: list[Any]
    sent: torch.Tensor

    def wait(self) -> torch.Tensor:
        """The tensor, on the current stream; the host waits where the backend is gloo."""
        for work in self.works:
            work.wait()
        return self.tensor


def pass_on(x: torch.Tensor, group: dist.ProcessGroup) -> Coming:
    """Send a contiguous tensor to the next rank of a ring, and get that of the previous one."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    following, previous = (
        dist.get_global_rank(group, (rank + step) % ranks) for step in (1, ranks - 1)
    )
    come = torch.empty_like(x)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, following, group),
            dist.P2POp(dist.irecv, come, previous, group),
        ]
    )
    return Coming(come, works, x)


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


def flat(*tensors: torch.Tensor) -> torch.Tensor:
    """One vector of all elements."""
    return torch.cat([x.reshape(-1) for x in tensors])


def unflat(vector: torch.Tensor, *shapes: torch.Size) -> tuple[torch.Tensor, ...]:
    """Views of a vector that `flat` has made."""
    parts = vector.split([shape.numel() for shape in shapes])
    return tuple([part.view(shape) for part, shape in zip(parts, shapes, strict=True)])
