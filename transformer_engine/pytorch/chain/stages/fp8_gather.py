"""All-gather of FP8 matrices: row-wise codes and scales, transposed after they are received.

A single scale is not sent: it is equal on all ranks, because their amaxes were reduced. Blocks of
1 x 128 values have no transpose, so their column-wise codes are gathered, too.
"""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine import _C
from transformer_engine.pytorch.fp8.casts.operands import Fp8Matrix, transposed
from transformer_engine.pytorch.kernels.shapes import rows_of
from transformer_engine.pytorch.parallel.collectives import Pending, all_gather
from transformer_engine.pytorch.scale_layout import ScaleLayout

_PRODUCT_ROWS = 16  # parts can be multiplied one by one if their rows are a multiple of this


def gather_rows(
    matrix: Fp8Matrix, group: Any, as_columns: bool = False, in_parts: bool = False
) -> Pending:
    """Gather the rows of all ranks into an `Fp8Matrix`.

    Args:
        matrix: codes `[..., k]`; blocks do not reach from one rank's rows into another's.
        group: process group.
        as_columns: return the transpose; the layout must have one.
        in_parts: see `all_gather`.
    """
    codes = all_gather(matrix.codes, group, in_parts)
    scales = _gather_scales(matrix, group)

    def finish(rows: torch.Tensor) -> Fp8Matrix:
        found = Fp8Matrix(rows, scales.wait(), matrix.format)
        return transposed(found) if as_columns else found

    has_parts = not (as_columns or matrix.layout.in_blocks or rows_of(matrix.codes) % _PRODUCT_ROWS)
    return codes.then(finish, finish if has_parts else None)


def gather_columns(matrix: Fp8Matrix, group: Any, in_parts: bool = False) -> Pending:
    """Gather column-wise codes of all ranks into an `Fp8Matrix` `[k, rows of all ranks]`.

    Args:
        matrix: codes `[k, rows]` of the transpose, in blocks along the rows.
        group: process group.
        in_parts: see `all_gather`.
    """
    codes = all_gather(matrix.codes, group, in_parts)
    # These scales are stored block by block along the rows, so ranks follow one another in memory.
    scales = all_gather(matrix.scales, group)

    def finish(rows: torch.Tensor) -> Fp8Matrix:
        whole = _side_by_side(rows, matrix.codes.shape[0])
        return Fp8Matrix(whole, scales.wait(), matrix.format)

    return codes.then(finish)


def _gather_scales(matrix: Fp8Matrix, group: Any) -> Pending:
    layout: ScaleLayout = matrix.layout
    if not layout.in_blocks:
        return Pending(matrix.scales)
    scales = all_gather(matrix.scales, group)
    if not layout.columns_first:
        return scales
    return scales.then(lambda all_of_them: _side_by_side(all_of_them, matrix.scales.shape[0]))


def _side_by_side(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Turn gathered `[ranks * rows, columns]` into `[rows, ranks * columns]`."""
    parts, columns = x.view(-1, rows, x.shape[-1]), x.shape[-1]
    if torch.compiler.is_compiling():
        return parts.transpose(0, 1).reshape(rows, -1)
    whole = x.new_empty((rows, parts.shape[0] * columns))
    for rank, part in enumerate(parts.unbind()):
        _C.copy(part, whole.narrow(1, rank * columns, columns))
    return whole
