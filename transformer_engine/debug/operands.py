"""Converts FP8 operands to the quantized tensors that features see, and back."""

from __future__ import annotations

import torch

from transformer_engine.pytorch.fp8.casts.operands import Fp8Matrix, Operands, Side
from transformer_engine.pytorch.fp8.casts.padding import resized
from transformer_engine.pytorch.fp8.casts.quantizers import Quantizer
from transformer_engine.pytorch.kernels.shapes import rows_of
from transformer_engine.pytorch.tensor import Float8BlockwiseQTensor, Float8Tensor, QuantizedTensor


def as_tensor(
    x: torch.Tensor, cast: Operands, quantizer: Quantizer | None
) -> QuantizedTensor | None:
    """Return the operands of `x` as a quantized tensor without padding; None if none is in FP8.

    `quantizer` is the public one, which the tensor refers to.
    """
    rows, cols = rows_of(x), x.shape[-1]
    rowwise = _side(cast.rowwise, rows, cols)
    columnwise = _side(cast.columnwise, cols, rows)
    some = rowwise or columnwise
    if some is None:
        return None
    kind = Float8BlockwiseQTensor if some.layout.in_blocks else Float8Tensor
    return kind.from_operands(Operands(rowwise, columnwise), x, quantizer)


def _side(side: Side | None, rows: int, cols: int) -> Fp8Matrix | None:
    return resized(side, rows, cols) if isinstance(side, Fp8Matrix) else None


def matrix(tensor: QuantizedTensor, columnwise: bool, padding: int) -> Fp8Matrix:
    """Return one side of a feature's tensor as an operand, with `padding` tokens of zeros added.

    Raises:
        ValueError: the tensor lacks that side.
    """
    side = tensor.side(columnwise)
    if side is None:
        raise ValueError(
            f"[modify_tensor] expected a {type(tensor).__name__} with "
            f"{'column' if columnwise else 'row'}-wise data, got one without"
        )
    if not padding:
        return side
    rows, cols = rows_of(tensor) + padding, tensor.shape[-1]
    return resized(side, *((cols, rows) if columnwise else (rows, cols)))
