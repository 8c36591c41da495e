"""Collectives of a process group along the first axis, as operations.

operation       forward          backward
AllGather       all-gather       reduce-scatter
ReduceScatter   reduce-scatter   all-gather
AllReduce       all-reduce       -
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.pytorch.module.inputs import check_tensors
from transformer_engine.pytorch.ops.operation import FusibleOperation
from transformer_engine.pytorch.parallel.collectives import (
    Pending,
    all_gather,
    all_reduce,
    reduce_scatter,
)
from transformer_engine.pytorch.parallel.groups import check_group, group_size


class _Collective(FusibleOperation):
    """Base of the collectives, which holds the process group.

    Args:
        process_group: the ranks that take part; None is all ranks. Copies of the operation have the
            same group; an operation that was pickled has None.

    Raises:
        TypeError: not a process group.
    """

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        check_group(type(self).__name__, "process_group", process_group)
        self.process_group = process_group

    def _group(self, x: torch.Tensor) -> tuple[Any, int]:
        """The group and its size, once the input was checked."""
        check_tensors(type(self).__name__, x=x)
        if x.ndim == 0:
            raise ValueError(f"[{type(self).__name__}] expected x of shape (rows, ...), got ()")
        group = self.process_group
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        return group, group_size(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Collective:
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        state = deepcopy(self.__getstate__(), memo)
        copy.__dict__.update(state, process_group=self.process_group)
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}


class AllGather(_Collective):
    """Concatenates the tensors of all ranks along the first axis.

    Args:
        process_group: these ranks; None is all ranks.

    Raises:
        TypeError: not a process group.

    >>> AllGather()(torch.ones(2, 3)).shape  # one rank alone
    torch.Size([2, 3])
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gather; the gradient is this rank's rows of the sum over the ranks.

        Args:
            x: `(rows, ...)`, of one shape and dtype on all ranks.

        Returns:
            `(ranks * rows, ...)`.

        Raises:
            ValueError: no axis to gather along.
            TypeError: not a dense tensor.
        """
        group, ranks = self._group(x)
        return x if ranks == 1 else _Exchange.apply(x, group, all_gather, reduce_scatter)


class ReduceScatter(_Collective):
    """This rank's rows of the sum over the ranks.

    Args:
        process_group: these ranks; None is all ranks.

    Raises:
        TypeError: not a process group.

    >>> ReduceScatter()(torch.ones(2, 3)).shape  # one rank alone
    torch.Size([2, 3])
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sum and scatter; the backward gathers the gradients of all ranks.

        Args:
            x: `(rows, ...)`, of one shape and dtype on all ranks; the number of ranks divides
                `rows`.

        Returns:
            `(rows / ranks, ...)`.

        Raises:
            ValueError: rows that cannot be shared.
            TypeError: not a dense tensor.
        """
        group, ranks = self._group(x)
        if x.shape[0] % ranks:
            raise ValueError(
                f"[ReduceScatter] expected rows divisible among {ranks} ranks, got {tuple(x.shape)}"
            )
        return x if ranks == 1 else _Exchange.apply(x, group, reduce_scatter, all_gather)


class AllReduce(_Collective):
    """The sum over the ranks.

    All ranks must use the sum in the same way, so that its gradient is equal on all ranks: the
    backward passes this gradient on without communication.

    Args:
        process_group: these ranks; None is all ranks.
        reduce_in_backward: has no effect.

    Raises:
        TypeError: not a process group.

    >>> AllReduce()(torch.ones(2, 3)).shape  # one rank alone
    torch.Size([2, 3])
    """

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sum.

        Args:
            x: `(rows, ...)`, of one shape and dtype on all ranks.

        Returns:
            The shape of `x`.

        Raises:
            ValueError: no axis.
            TypeError: not a dense tensor.
        """
        group, ranks = self._group(x)
        return x if ranks == 1 else _Exchange.apply(x, group, _summed, _unchanged)


Collective = Callable[[torch.Tensor, Any], Pending]


def _summed(x: torch.Tensor, group: Any) -> Pending:
    return all_reduce(x.clone(), group)


def _unchanged(grad: torch.Tensor, group: Any) -> Pending:
    return Pending(grad)


class _Exchange(torch.autograd.Function):
    """A collective in the forward, and another one, for the gradient, in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Any, forward: Collective, backward: Collective
    ) -> torch.Tensor:
        ctx.call = group, forward, backward
        return forward(x.contiguous(), group).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        group, forward, backward = ctx.call
        return _Exchange.apply(grad, group, backward, forward), None, None, None
