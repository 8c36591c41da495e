"""Padding with zero tokens: FP8 GEMMs take a multiple of 16 tokens, and zeros change no result."""

from __future__ import annotations

import torch

from transformer_engine import _C
from transformer_engine.pytorch.fp8.casts.operands import Fp8Matrix, Operands, Side
from transformer_engine.pytorch.kernels.memory import new_empty
from transformer_engine.pytorch.kernels.shapes import rows_of


def pad(x: torch.Tensor, padding: int) -> torch.Tensor:
    """Append `padding` zero tokens. The caller cuts the rows of these tokens off the result."""
    if not padding:
        return x
    matrix = x.reshape(-1, x.shape[-1])
    return _fitted(matrix, matrix.shape[0] + padding, matrix.shape[1])


def pad_side(side: Side | None, padding: int, columnwise: bool) -> Side | None:
    """One side of operands with zero tokens added; at any scale, the code of zero is zero."""
    if side is None or not padding:
        return side
    if not isinstance(side, Fp8Matrix):
        return pad(side, padding)
    rows, cols = rows_of(side.codes), side.codes.shape[-1]
    return resized(side, *((rows, cols + padding) if columnwise else (rows + padding, cols)))


def pad_operands(operands: Operands, padding: int) -> Operands:
    """Add zero tokens to operands that a kernel has already cast."""
    if not padding:
        return operands
    rowwise = pad_side(operands.rowwise, padding, False)
    return Operands(rowwise, pad_side(operands.columnwise, padding, True), operands.bias_grad)


def resized(matrix: Fp8Matrix, rows: int, cols: int) -> Fp8Matrix:
    """The codes cut, or padded with zeros, to `[rows, cols]`; scales of blocks are fitted, too."""
    codes = matrix.codes.view(rows_of(matrix.codes), matrix.codes.shape[-1])
    scales = matrix.scales
    if matrix.layout.in_blocks:
        scales = _fitted(scales, *matrix.layout.scale_shape(rows, cols))
    return Fp8Matrix(_fitted(codes, rows, cols), scales, matrix.format)


def _fitted(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    if x.shape == (rows, cols):
        return x
    own_rows, own_cols = x.shape
    cuts = rows < own_rows or cols < own_cols
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor or cuts:
        # Negative padding cuts. The result is contiguous, and must be no alias: Dynamo loses
        # tensors that alias another one of an autograd function, if the backward reads them.
        return torch.nn.functional.pad(x, (0, cols - own_cols, 0, rows - own_rows))
    out = new_empty(x, (rows, cols))
    _C.copy(x.contiguous(), out[:own_rows, :own_cols])
    _C.zero(out[own_rows:])
    _C.zero(out[:own_rows, own_cols:])
    return out
