"""`shard_sequence` and `gather_sequence`: which tokens of a sequence a rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
import torch.distributed as dist

from transformer_engine.pytorch.module.arguments import check_sizes
from transformer_engine.pytorch.module.inputs import check_rise, check_tensors, known_lengths
from transformer_engine.pytorch.parallel.agreement import agree_once
from transformer_engine.pytorch.parallel.exchange import all_gather_stack, reduce_scatter_stack
from transformer_engine.pytorch.parallel.groups import check_group
from transformer_engine.pytorch.parallel.order import (
    check_chunks,
    to_rank_order,
    to_sequence_order,
    tokens_of_rank,
)

Group = Any  # dist.ProcessGroup, a pair of them, or a DeviceMesh of one dimension


@overload
def shard_sequence(
    x: torch.Tensor, cp_group: Group, seq_dim: int = 0, *, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor: ...


@overload
def shard_sequence(
    x: Sequence[torch.Tensor],
    cp_group: Group,
    seq_dim: Sequence[int],
    *,
    cu_seqlens: torch.Tensor | None = None,
) -> list[torch.Tensor]: ...


def shard_sequence(
    x: Any, cp_group: Group, seq_dim: Any = 0, *, cu_seqlens: torch.Tensor | None = None
) -> Any:
    """The tokens of this rank: of n ranks, rank r has the chunks r and 2n - 1 - r of 2n.

    The gradient of `x` is zero for the tokens of other ranks; sum it over the ranks.

    Args:
        x: a tensor that is equal on all ranks; or a list of such tensors, like the buffers of
            `torch.distributed.tensor.experimental.context_parallel`.
        cp_group: process group; a list of two for `a2a+p2p`; or a DeviceMesh of one dimension.
        seq_dim: dimension of tokens; a list of dimensions if `x` is a list.
        cu_seqlens: int32 `[batch + 1]` for packed sequences, which follow one another in dimension
            0: where each of them begins, and where the last one ends. If there is room for padding,
            this is `cu_seqlens_q_padded`. Each sequence is cut by itself.

    Returns:
        A contiguous tensor with the tokens of both chunks; `x` itself if there is only one rank.

    Raises:
        ValueError: tokens that cannot be cut into 2n chunks of equal length; a dimension that `x`
            does not have; `cu_seqlens` that do not fit the tokens, or with another dimension than
            0.
        TypeError: `cp_group` is no process group, `x` or `cu_seqlens` no tensor, or `seq_dim` no
            int.

    Example:
        >>> shard_sequence(torch.arange(8), None)  # without a group all tokens are this rank's
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    if isinstance(x, list | tuple):
        _check_dims(x, seq_dim)
        parts = zip(x, seq_dim, strict=True)
        return [shard_sequence(one, cp_group, dim, cu_seqlens=cu_seqlens) for one, dim in parts]
    rank, ranks = _place("shard_sequence", cp_group)
    if ranks == 1:
        return x
    _check_tokens("shard_sequence", x, seq_dim, 1, ranks, cu_seqlens)
    if cu_seqlens is not None:
        return x.index_select(0, tokens_of_rank(cu_seqlens, ranks, rank, x.shape[0]))
    chunks = x.chunk(2 * ranks, seq_dim)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]), seq_dim)


def gather_sequence(
    x: torch.Tensor,
    cp_group: Group,
    seq_dim: int = 0,
    *,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The tokens of all ranks in the order of the sequence: the reverse of `shard_sequence`.

    The gradient is summed over the ranks, because the loss of the group is the sum of their losses.

    Ranks compare their arguments only before the first call of each shape, dtype, dimension and
    number of sequences. If they differ in a later call, ranks wait for each other, or get tokens in
    a wrong order.

    Args:
        x: tokens of this rank.
        cp_group: see `shard_sequence`.
        seq_dim: dimension of tokens.
        cu_seqlens: see `shard_sequence`.

    Returns:
        The same tensor on all ranks.

    Raises:
        ValueError: see `shard_sequence`.
        TypeError: see `shard_sequence`.
        RuntimeError: on all ranks, if their first calls differ in shapes, dtypes or `cu_seqlens`.

    Example:
        >>> gather_sequence(torch.arange(8), None)
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    _, ranks = _place("gather_sequence", cp_group)
    if ranks == 1:
        return x
    _check_tokens("gather_sequence", x, seq_dim, ranks, ranks, cu_seqlens)
    groups = _groups("gather_sequence", cp_group)
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    facts = {"x": list(x.shape), "dtype": x.dtype, "dim": seq_dim, "sequences": sequences}
    values = dict if cu_seqlens is None else lambda: {"cu_seqlens": cu_seqlens.tolist()}
    agree_once("gather_sequence", groups, facts, values)
    return _Gather.apply(x, groups, seq_dim, cu_seqlens)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        groups: list[dist.ProcessGroup],
        dim: int,
        cu_seqlens: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.call = groups, dim
        ctx.save_for_backward(cu_seqlens)
        for group in groups:  # begins with the group of neighbouring ranks
            x = all_gather_stack(x, group)
        ranks = x.shape[: len(groups)]
        return to_sequence_order(x.reshape(ranks.numel(), *x.shape[len(groups) :]), dim, cu_seqlens)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        groups, dim = ctx.call
        (cu_seqlens,) = ctx.saved_tensors
        sizes = [dist.get_world_size(group) for group in groups]
        total = 1
        for size in sizes:
            total *= size
        stack = to_rank_order(grad, dim, total, cu_seqlens)
        stack = stack.unflatten(0, tuple(sizes[::-1]))
        for group in reversed(groups):
            stack = reduce_scatter_stack(stack, group)
        return stack, None, None, None


def _groups(op: str, cp_group: Group) -> list[dist.ProcessGroup]:
    """The groups with more than one rank, the group of neighbouring ranks first."""
    if cp_group is None or not dist.is_initialized():
        return []
    groups = cp_group if isinstance(cp_group, list | tuple) else [cp_group]
    groups = [group.get_group() if hasattr(group, "get_group") else group for group in groups]
    for group in groups:
        check_group(op, "cp_group", group)
    return [group for group in groups if dist.get_world_size(group) > 1]


def _place(op: str, cp_group: Group) -> tuple[int, int]:
    """The number of this rank, and the number of ranks."""
    rank, ranks = 0, 1
    for group in _groups(op, cp_group):
        rank += ranks * dist.get_rank(group)
        ranks *= dist.get_world_size(group)
    return rank, ranks


def _check_dims(x: Sequence[torch.Tensor], dims: Any) -> None:
    listed = isinstance(dims, list | tuple)
    if not listed or len(dims) != len(x):
        got = f"{len(dims)} of them" if listed else f"{dims!r}"
        raise ValueError(
            f"[shard_sequence] expected seq_dim to be a list of {len(x)} dimensions, one for each"
            f" tensor, got {got}"
        )


def _check_tokens(
    op: str, x: torch.Tensor, dim: int, shares: int, ranks: int, cu_seqlens: torch.Tensor | None
) -> None:
    """Raise unless each sequence can be cut into equal chunks; `x` is one of `shares` of it."""
    check_tensors(op, x=x)
    check_sizes(op, None, -x.dim(), seq_dim=dim)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"[{op}] expected seq_dim of {x.dim()} dimensions, got {dim}")
    tokens = x.shape[dim] * shares
    lengths = [tokens]
    if cu_seqlens is not None:
        check_tensors(op, cu_seqlens=cu_seqlens)
        if dim % x.dim() != 0:
            raise ValueError(f"[{op}] expected seq_dim=0 with cu_seqlens, got {dim}")
        check_rise(op, "cu_seqlens", cu_seqlens, tokens)
        lengths += known_lengths(cu_seqlens)
    check_chunks(op, "sequences", lengths, ranks)
