"""Chunks of rows in another order, as after an exchange of tokens between ranks.

Both functions are compositions of torch operations, on any device, and do not wait for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch.module.inputs import as_tensor, can_read, check_tensors
from transformer_engine.pytorch.moe.permutation import INTEGERS, check_rows

__all__ = ["moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs"]


def moe_sort_chunks_by_index(
    inp: torch.Tensor,
    split_sizes: torch.Tensor | Sequence[int],
    sorted_index: torch.Tensor | Sequence[int],
) -> torch.Tensor:
    """Cut rows into chunks, and put the chunks into another order.

    Args:
        inp: `[rows, hidden]`.
        split_sizes: `[chunks]`, the rows of each chunk, which add up to `rows`.
        sorted_index: `[chunks]`, which chunk comes first, second, ...

    Returns:
        `[rows, hidden]`.

    Raises:
        ValueError: shapes that do not fit; on a CPU, sizes that do not add up, or indices that do
            not name each chunk once.
        TypeError: an input in FP8 or not a tensor; sizes or indices that are not integers.

    >>> moe_sort_chunks_by_index(torch.arange(4.0)[:, None], [1, 3], [1, 0]).flatten()
    tensor([1., 2., 3., 0.])
    """
    check_rows(inp)
    return inp.index_select(0, _chunk_order(inp, split_sizes, sorted_index))


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    split_sizes: torch.Tensor | Sequence[int],
    sorted_index: torch.Tensor | Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`moe_sort_chunks_by_index` for rows, and for one weight per row.

    Args:
        inp: `[rows, hidden]`.
        probs: `[rows]`.
        split_sizes: see `moe_sort_chunks_by_index`.
        sorted_index: see `moe_sort_chunks_by_index`.

    Returns:
        `(rows, weights)`, of the shapes of `inp` and `probs`.

    Raises:
        ValueError: see `moe_sort_chunks_by_index`; another number of weights than of rows.
        TypeError: see `moe_sort_chunks_by_index`.

    >>> rows, weights = torch.ones(3, 1), torch.tensor([0.1, 0.2, 0.3])
    >>> moe_sort_chunks_by_index_with_probs(rows, weights, [2, 1], [1, 0])[1]
    tensor([0.3000, 0.1000, 0.2000])
    """
    check_rows(inp)
    check_tensors("moe_sort_chunks_by_index", probs=probs)
    if probs.shape != inp.shape[:1]:
        raise ValueError(
            f"[moe_sort_chunks_by_index] expected probs [{inp.shape[0]}], one for each row, got "
            f"{tuple(probs.shape)}"
        )
    order = _chunk_order(inp, split_sizes, sorted_index)
    return inp.index_select(0, order), probs.index_select(0, order)


def _chunk_order(
    inp: torch.Tensor,
    split_sizes: torch.Tensor | Sequence[int],
    sorted_index: torch.Tensor | Sequence[int],
) -> torch.Tensor:
    """The index in `inp` of each row of the result."""
    sizes = _integers("split_sizes", split_sizes, inp.device)
    order = _integers("sorted_index", sorted_index, inp.device)
    rows = inp.shape[0]
    if sizes.ndim != 1 or sizes.shape != order.shape:
        raise ValueError(
            "[moe_sort_chunks_by_index] expected as many sizes as indices of chunks, got "
            f"{tuple(sizes.shape)} and {tuple(order.shape)}"
        )
    if can_read(sizes) and (int(sizes.sum()) != rows or bool(sizes.lt(0).any())):
        raise ValueError(
            f"[moe_sort_chunks_by_index] expected sizes that add up to {rows}, got {sizes.tolist()}"
        )
    if can_read(order) and sorted(order.tolist()) != list(range(order.numel())):
        raise ValueError(
            "[moe_sort_chunks_by_index] expected sorted_index with each index from 0 to"
            f" {order.numel() - 1} once, got {order.tolist()}"
        )
    # A row comes from its own index plus (old start - new start) of its chunk.
    starts, moved = sizes.cumsum(0) - sizes, sizes[order]
    shifts = starts[order] - (moved.cumsum(0) - moved)
    return torch.arange(rows, device=inp.device) + shifts.repeat_interleave(moved, output_size=rows)


def _integers(name: str, values: Any, device: torch.device) -> torch.Tensor:
    op, wanted = "moe_sort_chunks_by_index", f"{name} to be a tensor or a list of integers"
    found = as_tensor(op, wanted, values)
    if found.numel() and found.dtype not in INTEGERS:  # torch makes fp32 of an empty list
        raise TypeError(f"[{op}] expected {wanted}, got {values!r}")
    return found.to(device, torch.int64)
