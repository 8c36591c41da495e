"""What a row of statistics holds, how rows of several ranks merge, and what can be read off one.

A slot is sixteen float64 values on the device that the tensor lives on. Kernels merge every tensor
that they see into it (csrc/core/moments.h defines both layouts):

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
    statistics,
)

WIDTH = 16
BLOCKWISE = "max_blockwise_dynamic_range"


class Kind(IntEnum):
    """What a slot holds."""

    MOMENTS = 0
    CASTS = 1
    BLOCKS = 2


_EMPTY: dict[Kind, tuple[float, ...]] = {
    Kind.MOMENTS: EMPTY_MOMENTS,
    Kind.CASTS: EMPTY_CAST_MOMENTS,
    Kind.BLOCKS: (0.0, 0.0),
}


# How fields merge; means and m2 have a formula of their own.
_SUM, _LEAST, _MOST = 0, 1, 2
_RULES = torch.zeros(len(Kind), WIDTH, dtype=torch.int8)
_RULES[Kind.MOMENTS, [5, 8]] = _LEAST
_RULES[Kind.MOMENTS, [6, 7]] = _MOST
_RULES[Kind.CASTS, 4] = _LEAST
_RULES[Kind.CASTS, 5] = _MOST
_RULES[Kind.BLOCKS, 1] = _MOST


def empty_row(kind: Kind) -> list[float]:
    """The row that merging leaves unchanged."""
    row = _EMPTY[kind]
    return [*row, *[0.0] * (WIDTH - len(row))]


def read(kind: Kind, row: Sequence[float], numel: int = 0) -> dict[str, float]:
    """Every statistic of a row that has a count, by name.

    Args:
        kind: what the row holds.
        row: its sixteen fields.
        numel: of a weight, which counts once; zero where feeds accumulate.
    """
    if kind is Kind.MOMENTS:
        return statistics(one_feed(row, numel))
    if kind is Kind.CASTS:
        found = cast_statistics(row[:CAST_MOMENTS_FIELDS])
        if math.isinf(found["scale_inv_min"]):  # no scale but zeros
            found["scale_inv_min"] = 0.0
        return found
    return {BLOCKWISE: row[1]}


def one_feed(row: Sequence[float], numel: int) -> Sequence[float]:
    """A moments row of a weight as if it had been fed once.

    A replayed CUDA graph feeds its weights with every micro-batch; they are equal, so the sums are
    a multiple of what one feed gives.
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
        float64 `[slots, 16]`; exact but for the rounding of float64.

    >>> row = torch.tensor(empty_row(Kind.MOMENTS), dtype=torch.float64)
    >>> merge_ranks(row.expand(2, 1, 16), torch.zeros(1, dtype=torch.int64))[0, :2].tolist()
    [0.0, 0.0]
    """
    merged = rows[0].clone()
    for row in rows[1:]:
        _merge(merged, row, kinds)
    return merged


def _merge(into: torch.Tensor, row: torch.Tensor, kinds: torch.Tensor) -> None:
    rules = _RULES[kinds]
    both = torch.where(rules == _LEAST, torch.minimum(into, row), torch.maximum(into, row))
    both = torch.where(rules == _SUM, into + row, both)
    moments = (kinds == Kind.MOMENTS)[:, None]
    both[:, 1:3] = torch.where(moments, _merged_means(into, row), both[:, 1:3])
    into.copy_(both)


def _merged_means(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Mean and m2 by Chan's formula; a side without elements adds nothing."""
    count = (a[:, 0] + b[:, 0]).clamp(min=1)
    share, from_share = a[:, 0] / count, b[:, 0] / count
    apart = b[:, 1] - a[:, 1]
    mean = a[:, 1] * share + b[:, 1] * from_share
    m2 = a[:, 2] + b[:, 2] + apart * apart * a[:, 0] * from_share
    merged = torch.where((b[:, 0] == 0)[:, None], a[:, 1:3], torch.stack([mean, m2], dim=1))
    return torch.where((a[:, 0] == 0)[:, None], b[:, 1:3], merged)
