"""Collectives that are started now and waited for later, along the first axis of tensors.

In eager mode these are torch.distributed's own calls, in compiled code its functional ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.pytorch._torch_private import functional_collectives as functional

# torch 2.13 has other names for these, and warns of the old ones at each call.
gather_into: Any = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)
scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or getattr(
    dist, "reduce_scatter_tensor", None
)

Finish = Callable[[torch.Tensor], Any]


class Pending:
    """What a collective is making; `wait` gives it.

    Args:
        result: where it will be.
        work: torch's handle; None where nothing is to be waited for.
        finish: what is done with it once it is there.
        held: memory that the collective reads.
    """

    __slots__ = ("_finish", "_held", "_work", "result")

    def __init__(
        self, result: Any, work: Any = None, finish: Finish | None = None, held: Any = None
    ) -> None:
        self.result = result
        self._work = work
        self._finish = finish
        self._held = held

    def wait(self) -> Any:
        """The result. On a GPU the stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
        if self._finish is not None:
            self.result = self._finish(self.result)
        self._work = self._finish = self._held = None
        return self.result

    def then(self, finish: Finish) -> Pending:
        """The same, with something more to do once it is there."""
        return Pending(None, self, lambda _: finish(self.result))


def waited(value: Any) -> Any:
    """The value, waited for if it is pending."""
    return value.wait() if type(value) is Pending else value


def all_reduce(x: torch.Tensor, group: Any, op: str = "sum") -> Pending:
    """The sum (or maximum) over the ranks, in the memory of `x`; in compiled code a fresh tensor.

    Args:
        x: contiguous, of equal shape on all ranks.
        group: process group.
        op: `sum` or `max`.
    """
    if torch.compiler.is_compiling():
        return Pending(functional.wait_tensor(functional.all_reduce(x, op, group)))
    kind = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
    return Pending(x, dist.all_reduce(x, kind, group, async_op=True))


def all_gather(x: torch.Tensor, group: Any) -> Pending:
    """The tensors of all ranks one behind the other, `[ranks * rows, ...]` of `[rows, ...]`."""
    if torch.compiler.is_compiling():
        return Pending(functional.wait_tensor(functional.all_gather_tensor(x, 0, group)))
    result = x.new_empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]))
    work = gather_into(result, x, group=group, async_op=True)
    return Pending(result, work, held=x)


def reduce_scatter(x: torch.Tensor, group: Any) -> Pending:
    """This rank's rows of the sum over the ranks: `[rows / ranks, ...]` of `[rows, ...]`."""
    if torch.compiler.is_compiling():
        summed = functional.reduce_scatter_tensor(x, "sum", 0, group)
        return Pending(functional.wait_tensor(summed))
    result = x.new_empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]))
    work = scatter_into(result, x, group=group, async_op=True)
    return Pending(result, work, held=x)
