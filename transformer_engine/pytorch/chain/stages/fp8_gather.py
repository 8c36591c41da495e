"""All-gather of FP8 matrices: row-wise codes and scales, which the receiver transposes.

If only the transpose is needed, and it passes through peer memory, the sender transposes.

A single scale is not sent: it is equal on all ranks, because their amaxes were reduced. Blocks of
1 x 128 values have no transpose, so their column-wise codes are gathered, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from transformer_engine import _C
from transformer_engine.pytorch.fp8.casts.operands import Fp8Matrix, Operands, transposed
from transformer_engine.pytorch.kernels.shapes import rows_of
from transformer_engine.pytorch.parallel.collectives import (
    GATHERS,
    Pending,
    RankParts,
    all_gather,
    way_of,
)
from transformer_engine.pytorch.parallel.peer_memory import PeerMemory
from transformer_engine.pytorch.scale_layout import ScaleLayout

_PRODUCT_ROWS = 16  # parts can be multiplied one by one if their rows are a multiple of this


def gather_rows(matrix: Fp8Matrix, group: Any, in_parts: bool = False) -> Pending:
    """Gather the rows of all ranks into an `Fp8Matrix`; for `in_parts` see `all_gather`.

    Codes are `[..., k]`; blocks do not reach from one rank's rows into another's.
    """
    codes = all_gather(matrix.codes, group, in_parts)
    scales = _gather_scales(matrix, group)

    def finish(rows: torch.Tensor) -> Fp8Matrix:
        return Fp8Matrix(rows, scales.wait(), matrix.format)

    return codes.then(finish, finish if _has_parts(matrix) else None)


def gather_both_sides(matrix: Fp8Matrix, group: Any, in_parts: bool = False) -> Pending:
    """Gather the rows of all ranks into `Operands`, with the transpose as the column-wise side.

    See `gather_rows`; the layout of `matrix` has a transpose.
    """
    rows = gather_rows(matrix, group, in_parts)
    if rows.has_parts:
        return _TransposedGather(rows)
    return rows.then(lambda row: Operands(row, transposed(row)))


def gather_transposed(matrix: Fp8Matrix, group: Any, in_parts: bool = False) -> Pending:
    """Gather the rows of all ranks, and transpose them: an `Fp8Matrix` `[k, rows of all ranks]`.

    See `gather_rows`; the layout of `matrix` has a transpose. With `in_parts` each rank writes its
    columns to peer memory, where there is any.
    """
    memory = None
    if _has_parts(matrix):
        memory = way_of(matrix.codes, group, whole=False, in_parts=in_parts).memory
    if memory is not None:
        shape = (matrix.codes.shape[-1], memory.ranks * rows_of(matrix.codes))
        out = memory.across(GATHERS, shape)
        if out is not None:
            return _ColumnGather(matrix, memory, out)
    return gather_rows(matrix, group, in_parts).then(transposed)


def _has_parts(matrix: Fp8Matrix) -> bool:
    """Whether a GEMM can take the rows of one rank alone."""
    return not (matrix.layout.in_blocks or rows_of(matrix.codes) % _PRODUCT_ROWS)


class _ColumnGather(Pending):
    """An all-gather of transposed rows: the rows of each rank are columns of the result.

    Args:
        matrix: this rank's rows.
        memory: peer memory.
        out: memory for the codes of the result: a slot of peer memory, of which every rank writes
            its columns.
    """

    __slots__ = ("_lent", "_matrix", "_out", "_transfer")

    def __init__(self, matrix: Fp8Matrix, memory: PeerMemory, out: torch.Tensor) -> None:
        super().__init__(None)
        self._matrix, self._out, self._lent = matrix, out, False
        self._transfer = memory.start(self, GATHERS)
        rows = rows_of(matrix.codes)
        own = out.narrow(1, memory.rank * rows, rows)
        _C.transpose(matrix.codes, own)
        self._transfer.spread(own)

    def lend(self) -> Fp8Matrix:
        """The codes lie in peer memory until `release`."""
        if self.result is None:
            self._transfer.receive_all()
            self._lent = True
            return self._with(self._out)
        return self.result  # a later collective has waited for this one already

    def release(self) -> None:
        if self._lent:
            self._transfer.release_all()
            self._lent = False

    def wait(self) -> Fp8Matrix:
        """The result, with its codes copied out of peer memory."""
        if self.result is None:
            codes = torch.empty_like(self._out)
            _C.copy(self.lend().codes, codes)
            self.release()
            self.result = self._with(codes)
        return self.result

    def _with(self, codes: torch.Tensor) -> Fp8Matrix:
        return Fp8Matrix(codes, self._matrix.scales, self._matrix.format)


class _TransposedGather(Pending):
    """`Operands` of all ranks' rows; each part is transposed to its place as it arrives.

    Args:
        rows: the result of `gather_rows`, which arrives in parts.
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: Pending) -> None:
        super().__init__(None)
        self._rows = rows

    @property
    def has_parts(self) -> bool:
        return True

    def parts(self, keep: bool) -> RankParts:
        arriving = self._rows.parts(keep=False)
        assert arriving is not None
        return RankParts(arriving.ranks, self._transposing(arriving, keep))

    def _transposing(self, arriving: RankParts, keep: bool) -> Iterator[tuple[int, Operands]]:
        columns: Any = None
        for rank, part in arriving.each:
            yield rank, Operands(part, None)
            if keep:
                tokens, features = rows_of(part.codes), part.codes.shape[-1]
                if columns is None:
                    columns = part.codes.new_empty((features, arriving.ranks * tokens))
                _C.transpose(part.codes, columns.narrow(1, rank * tokens, tokens))
        if keep:
            self.result = Operands(None, Fp8Matrix(columns, part.scales, part.format))

    def wait(self) -> Operands:
        """Both sides, or only the column-wise one if all parts have been read before."""
        if self.result is None:
            row = self._rows.wait()
            self.result = Operands(row, transposed(row))
        return self.result


def gather_columns(matrix: Fp8Matrix, group: Any, in_parts: bool = False) -> Pending:
    """Gather column-wise codes of all ranks into an `Fp8Matrix` `[k, rows of all ranks]`.

    Codes are `[k, rows]` of the transpose, in blocks along the rows; for `in_parts` see
    `all_gather`.
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
