"""Rows of statistics: their layouts, how rows of several ranks merge, and what is read from them.

A row is sixteen float64 values on the device of the tensor. A kernel merges the moments of each
tensor that it processes into the row. csrc/core/moments.h defines the layouts of rows and how two
rows merge:

    moments  the fields of `kernels.moments.MOMENTS`
    casts    the fields of `kernels.moments.CAST_MOMENTS`
    blocks   0 count, 1 the largest dynamic range of a block

The empty row is neutral: merging it changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import torch

from transformer_engine.pytorch.kernels.moments import (
    CAST_MOMENTS_FIELDS,
    EMPTY_CAST_MOMENTS,
    EMPTY_MOMENTS,
    cast_statistics,
    merge_rows,
    statistics,
)

WIDTH = 16
BLOCKWISE = "max_blockwise_dynamic_range"


class Kind(IntEnum):
    """The layout of a row; the numbers are those of `RowKind` in csrc/core/moments.h."""

    MOMENTS = 0
    CASTS = 1
    BLOCKS = 2


_EMPTY: dict[Kind, tuple[float, ...]] = {
    Kind.MOMENTS: EMPTY_MOMENTS,
    Kind.CASTS: EMPTY_CAST_MOMENTS,
    Kind.BLOCKS: (0.0, 0.0),
}


def empty_row(kind: Kind) -> list[float]:
    """Return the row of no tensor, which changes nothing when it is merged."""
    row = _EMPTY[kind]
    return [*row, *[0.0] * (WIDTH - len(row))]


def read(kind: Kind, row: Sequence[float], numel: int = 0) -> dict[str, float]:
    """Return every statistic of a row by name; `numel` as in `one_feed`."""
    if kind is Kind.MOMENTS:
        return statistics(one_feed(row, numel))
    if kind is Kind.CASTS:
        found = cast_statistics(row[:CAST_MOMENTS_FIELDS])
        if math.isinf(found["scale_inv_min"]):  # all scales are zero
            found["scale_inv_min"] = 0.0
        return found
    return {BLOCKWISE: row[1]}


def one_feed(row: Sequence[float], numel: int) -> Sequence[float]:
    """Return a moments row of a weight as if it had been fed once.

    A replayed CUDA graph merges the weight into the row in every micro-batch. The weight is the
    same each time, so each sum in the row is a multiple of the sum of one feed.

    Args:
        row: the row, into which the weight was merged once or several times.
        numel: elements of the weight; 0 for other tensors, whose row stays as it is.
    """
    if not numel or row[0] <= numel or row[0] % numel:
        return row
    feeds = row[0] / numel
    single = list(row)
    for index in (0, 2, 3, 4, 9, 10, 11):
        single[index] = row[index] / feeds
    return single


def merge_ranks(rows: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Merge the rows of several ranks, in rank order.

    Args:
        rows: float64 `[ranks, slots, 16]`.
        kinds: int64 `[slots]`, values of `Kind`.

    Returns:
        float64 `[slots, 16]`; exact except for rounding in float64.

    >>> row = torch.tensor(empty_row(Kind.MOMENTS), dtype=torch.float64)
    >>> merge_ranks(row.expand(2, 1, 16), torch.zeros(1, dtype=torch.int64))[0, :2].tolist()
    [0.0, 0.0]
    """
    merged = rows[0].contiguous().clone()
    merge_rows(rows[1:].contiguous(), kinds, merged)
    return merged
