"""`Operands`: matrices as GEMMs take them, plain or FP8, in the orientation that each GEMM needs.

A Linear has three GEMMs:

    fprop   y  = x  . w^T      takes x row-wise,  w row-wise
    dgrad   dx = dy . w        takes dy row-wise, w column-wise
    wgrad   dw = dy^T . x      takes dy column-wise, x column-wise

Hopper multiplies FP8 matrices only along their contiguous axis, so a column-wise FP8 matrix is a
stored transpose. A column-wise plain matrix is the matrix itself; the GEMM reads it transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from transformer_engine.pytorch.kernels.transpose import transpose, transpose_blocks
from transformer_engine.pytorch.scale_layout import ScaleLayout, element_of, layout_of

if TYPE_CHECKING:
    from transformer_engine.pytorch.fp8.casts.quantizers import Quantizer


class Fp8Matrix:
    """FP8 codes `uint8 [m, k]`, their scales, and their format as `_C` takes it.

    The scales are `fp32 [2] = {1/scale, scale}`, or the inverse scales of all blocks: see `layout`.
    """

    __slots__ = ("codes", "format", "scales")

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, format: int) -> None:
        self.codes = codes
        self.scales = scales
        self.format = format

    @property
    def layout(self) -> ScaleLayout:
        """How the scales belong to the codes."""
        return layout_of(self.format)

    @property
    def element(self) -> int:
        """The type of the codes, a value of `DType`."""
        return element_of(self.format)


Side: TypeAlias = torch.Tensor | Fp8Matrix


def transposed(matrix: Fp8Matrix) -> Fp8Matrix:
    """The transpose of codes, where their layout has one (`ScaleLayout.transposes`)."""
    if not matrix.layout.in_blocks:
        return Fp8Matrix(transpose(matrix.codes), matrix.scales, matrix.format)
    codes, scales = transpose_blocks(matrix.codes, matrix.scales)
    return Fp8Matrix(codes, scales, matrix.format)


def some_rows(side: Side, rows: slice) -> Side:
    """Some rows of a matrix; the scales of codes are those of the whole matrix."""
    if isinstance(side, Fp8Matrix):
        return Fp8Matrix(side.codes[rows], side.scales, side.format)
    return side[rows]


def scale_pair(scales: torch.Tensor) -> torch.Tensor:
    """fp32 `[2]` = {1/scale, scale}, from `scales` that may have only the first element."""
    scales = scales.reshape(-1)
    return scales if scales.numel() == 2 else torch.cat([scales, scales.reciprocal()])


class Operands:
    """A tensor as its GEMMs take it; a side that no GEMM takes is None.

    `bias_grad` is set if the kernel that quantised a gradient also summed its columns.
    """

    __slots__ = ("bias_grad", "columnwise", "rowwise")

    def __init__(
        self,
        rowwise: Side | None,
        columnwise: Side | None,
        bias_grad: torch.Tensor | None = None,
    ) -> None:
        self.rowwise = rowwise
        self.columnwise = columnwise
        self.bias_grad = bias_grad


OPERAND_TENSORS = 5  # length of `flatten_operands`


def flatten_operands(operands: Operands) -> tuple[torch.Tensor | None, ...]:
    """The five tensors of operands: codes and scales of both sides, and the bias gradient."""
    sides = (_side_parts(operands.rowwise), _side_parts(operands.columnwise))
    return (*sides[0], *sides[1], operands.bias_grad)


def operands_like(operands: Operands, parts: Sequence[torch.Tensor | None]) -> Operands:
    """The reverse of `flatten_operands`: operands with the same sides and formats."""
    row, row_scales, column, column_scales, bias_grad = parts
    rowwise = _side_like(operands.rowwise, row, row_scales)
    return Operands(rowwise, _side_like(operands.columnwise, column, column_scales), bias_grad)


def _side_parts(side: Side | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (side.codes, side.scales) if isinstance(side, Fp8Matrix) else (side, None)


def _side_like(side: Side | None, data: Any, scales: Any) -> Side | None:
    return Fp8Matrix(data, scales, side.format) if isinstance(side, Fp8Matrix) else data


def flatten_values(values: Sequence[Any]) -> list[torch.Tensor | None]:
    """A list of tensors: `values`, with all `Operands` flattened."""
    found: list[torch.Tensor | None] = []
    for x in values:
        found += flatten_operands(x) if type(x) is Operands else (x,)
    return found


def unflatten_values(tensors: Sequence[torch.Tensor | None], like: Sequence[Any]) -> list[Any]:
    """The reverse of `flatten_values`: `Operands` wherever `like` has some."""
    rest = iter(tensors)
    return [
        operands_like(x, [next(rest) for _ in range(OPERAND_TENSORS)])
        if type(x) is Operands
        else next(rest)
        for x in like
    ]


def structure_of(operands: Operands) -> Operands:
    """Operands with the same sides and formats but empty tensors, for `operands_like`."""
    empty, tensors = torch.empty(0), flatten_operands(operands)
    return operands_like(operands, [None if t is None else empty for t in tensors])


class OperandRequest:
    """The sides of a tensor that the next GEMMs take, the quantizer that makes them, and extras.

    With `bias_grad`, a dtype, the kernel also sums the columns. `moments` is a row of the debugger
    into which the kernel merges the moments of the tensor, if the flag `active` on the device says
    so; see `kernels.moments.moments`.
    """

    __slots__ = ("active", "bias_grad", "columnwise", "moments", "quantizer", "rowwise")

    def __init__(
        self,
        quantizer: Quantizer,
        rowwise: bool,
        columnwise: bool,
        bias_grad: torch.dtype | None = None,
        moments: torch.Tensor | None = None,
        active: torch.Tensor | None = None,
    ) -> None:
        self.quantizer = quantizer
        self.rowwise = rowwise
        self.columnwise = columnwise
        self.bias_grad = bias_grad
        self.moments = moments
        self.active = active


class FusedArguments(NamedTuple):
    """Arguments of a fused kernel for a request: see `kernels.norm` and `kernels.activation`."""

    plain: bool  # a plain result is needed
    format: int = -1
    scale: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    rowwise: bool = False
    columnwise: bool = False
    current: bool = False
    power_of_2: bool = False
    epsilon: float = 0.0
    moments: torch.Tensor | None = None
    active: torch.Tensor | None = None


class FusedOutputs(NamedTuple):
    """What a fused kernel returns; None for what was not requested."""

    plain: torch.Tensor | None
    codes: torch.Tensor | None
    transposed: torch.Tensor | None
    scales: torch.Tensor | None
    bias_grad: torch.Tensor | None = None


class PendingCast(NamedTuple):
    """A result of a stage that is yet to be cast; with `scales` if the kernel has computed them.

    The chain casts it after it has freed the inputs of the stage, which lowers the memory peak.
    """

    plain: torch.Tensor
    scales: torch.Tensor | None
    request: OperandRequest
    bias_grad: torch.Tensor | None

    def cast(self) -> Operands:
        """The operands; `bias_grad` is not computed again."""
        request, quantizer = self.request, self.request.quantizer
        sides = OperandRequest(
            quantizer, request.rowwise, request.columnwise, None, request.moments, request.active
        )
        operands = quantizer.cast(self.plain, self.scales, sides)
        operands.bias_grad = self.bias_grad
        return operands


Value: TypeAlias = torch.Tensor | Operands  # input of a stage
Result: TypeAlias = Value | PendingCast  # result of a stage
