"""GEMMs that run rank by rank over rows, so that they overlap with a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from transformer_engine.pytorch.fp8.casts.operands import Fp8Matrix, Side, some_rows
from transformer_engine.pytorch.parallel.collectives import LazyProduct, RankParts

Multiply = Callable[[Side, "torch.Tensor | None"], torch.Tensor]


def product_of_parts(
    parts: RankParts, columns: int, dtype: torch.dtype, multiply: Multiply
) -> torch.Tensor:
    """Multiply rows that arrive rank by rank, each part as soon as it is there.

    `parts` are `Operands` of one rank after the other; `multiply` writes the product of some rows,
    which has `columns` columns, into a given tensor.
    """
    out: Any = None
    for rank, part in parts.each:
        values = _values(part.rowwise)
        rows = values.shape[0]
        if out is None:
            shape = (parts.ranks * rows, *values.shape[1:-1], columns)
            out = values.new_empty(shape, dtype=dtype)
        multiply(part.rowwise, out[rank * rows : (rank + 1) * rows])
    return out


def product_by_rows(
    side: Side, columns: int, dtype: torch.dtype, multiply: Multiply
) -> LazyProduct | torch.Tensor:
    """A product that computes rows when they are read. With block scales it is computed at once."""
    if isinstance(side, Fp8Matrix) and side.layout.in_blocks:
        return multiply(side, None)
    values = _values(side)
    out = values.new_empty((*values.shape[:-1], columns), dtype=dtype)

    def compute(where: slice | None) -> None:
        if where is None:
            multiply(side, out)
        else:
            multiply(some_rows(side, where), out[where])

    return LazyProduct(out, compute)


def _values(side: Side) -> torch.Tensor:
    return side.codes if isinstance(side, Fp8Matrix) else side
