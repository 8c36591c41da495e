"""Helpers that turn the sides of `Operands` into tensors that autograd can save, and back."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch._torch_private import part_of
from transformer_engine.pytorch.capture import is_host_bound
from transformer_engine.pytorch.chain.stages.matmul_plan import MatmulPlan
from transformer_engine.pytorch.fp8.casts.operands import (
    Fp8Matrix,
    Operands,
    PendingCast,
    Side,
    Value,
    transposed,
)
from transformer_engine.pytorch.fp8.casts.padding import pad
from transformer_engine.pytorch.fp8.casts.watched import Watched
from transformer_engine.pytorch.kernels.cast import cast
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.kernels.memory import strides_of
from transformer_engine.pytorch.tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.quantized_tensor import rowwise_of


def flatten(side: Side | None) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Values or codes, scales, and the format of codes (else -1)."""
    if isinstance(side, Fp8Matrix):
        return side.codes, side.scales, side.format
    return side, None, -1


def saved_side(x: Any, operands: Operands, padding: int, plan: MatmulPlan) -> Side | None:
    """The side of a tensor that the backward reads: column-wise, or what the recipe asks for.

    With its `backward_override` these are the values before the cast, with rows of zeros appended,
    or the row-wise codes; except where a feature of the debugger has made a column-wise side.
    """
    column = operands.columnwise
    if not plan.overridden or isinstance(column, torch.Tensor):
        return column
    return pad(cast(x, plan.dtype), padding) if plan.saves_values else operands.rowwise


def saved_weight(
    weight: torch.Tensor, own: Fp8Matrix | None, operands: Operands, plan: MatmulPlan
) -> tuple[Side | None, bool]:
    """What the backward reads of a weight, and whether that is row-wise codes.

    `own` are the codes of a weight kept in FP8.
    """
    if not plan.needs_input:
        return None, False
    if own is not None and operands.columnwise is None:
        return own, True
    side = saved_side(weight, operands, 0, plan)
    return side, plan.overridden and isinstance(side, Fp8Matrix)


def saved_input(
    x: Any, operands: Operands, padding: int, plan: MatmulPlan
) -> tuple[torch.Tensor | None, torch.Tensor | None, int, bool]:
    """What a Matmul saves of its input, as `flatten` returns it.

    The last element says whether the backward gathers or computes the input again instead.
    """
    if plan.omits_input:
        _, scales, format = flatten(None if plan.overridden else operands.rowwise)
        return None, scales, format, True
    if not plan.needs_weight:
        return None, None, -1, False
    gathered = operands.columnwise is None and not isinstance(x, torch.Tensor)
    regathered = gathered and not plan.overridden
    original = plan.input_in_backward is not None and not regathered
    return *flatten(x if original else saved_side(x, operands, padding, plan)), regathered


def restore(data: torch.Tensor | None, scales: torch.Tensor | None, format: int) -> Side | None:
    """The reverse of `flatten`."""
    if data is None or scales is None:
        return data
    return Fp8Matrix(data, scales, format)


def shape_of(value: Value | Watched) -> torch.Size:
    """The shape of a tensor, or of the tensor that `Operands` (row-wise at least) stand for."""
    if isinstance(value, Watched):
        return value.plain.shape
    side = value.rowwise if isinstance(value, Operands) else value
    assert side is not None
    return side.codes.shape if isinstance(side, Fp8Matrix) else side.shape


def without_padding(
    y: torch.Tensor, shape: torch.Size, padding: int, plan: MatmulPlan
) -> torch.Tensor:
    """`y` without the rows of padding, as `[*shape, features]`.

    In eager mode autograd does not see that the result is a view: it would refuse to change a view
    in place that an autograd function has returned.
    """
    sizes = (*shape, y.shape[-1])
    if plan.compiling or type(y) is not torch.Tensor:  # a fake tensor
        return y[: y.shape[0] - padding].view(sizes)
    return part_of(y, sizes, strides_of(sizes), int(y.storage_offset()))


def own_matrix(weight: torch.Tensor) -> Fp8Matrix:
    """The row-wise codes and scales of a weight kept in FP8."""
    assert isinstance(weight, QuantizedTensor)
    matrix = rowwise_of(weight)
    assert matrix is not None  # see `fp8_weights.validate`
    return matrix


def columnwise_of(rows: Side | None, other: Side | None, dtype: torch.dtype) -> Side:
    """The column-wise side of row-wise codes, made only for the GEMM with `other`.

    It is the transpose of the codes if the other operand is FP8, else the values in `dtype`.
    """
    assert isinstance(rows, Fp8Matrix)
    if isinstance(other, Fp8Matrix):
        return transposed(rows)
    return dequantize(rows.codes, rows.format, rows.scales, dtype)


def grad_operands(
    grad: torch.Tensor, padding: int, plan: MatmulPlan
) -> tuple[Operands, PendingCast | None]:
    """A gradient as operands, and its column-wise side if that is cast later, when wgrad needs it.

    The codes of that side would take memory while the stages between dgrad and wgrad run, and
    autograd keeps the gradient itself until then anyway. Small gradients are cast in one kernel.
    """
    quantizer, columns = plan.quantizers.grad_output, plan.grad_columns
    if columns is None or padding or is_host_bound(grad):
        return quantizer.padded(grad, padding, plan.grad_request), None  # type: ignore[arg-type]
    operands = quantizer.operands(grad, plan.grad_rows)  # type: ignore[arg-type]
    scales = operands.rowwise.scales  # type: ignore[union-attr]
    return operands, PendingCast(grad, scales, columns, operands.bias_grad)


def for_wgrad(grad: Operands) -> Operands:
    """A gradient without the row-wise codes, whose memory is free once dgrad has read them."""
    if grad.columnwise is None or not isinstance(grad.rowwise, Fp8Matrix):
        return grad
    return Operands(None, grad.columnwise, grad.bias_grad)


def detached(side: Side | None) -> Side | None:
    """The side with its tensors detached from autograd's graph."""
    if isinstance(side, Fp8Matrix):
        return Fp8Matrix(side.codes.detach(), side.scales.detach(), side.format)
    return None if side is None else side.detach()


def tensors_of(operands: Operands) -> tuple[torch.Tensor | None, ...]:
    """Data and scales of both sides; scales that both share are listed once."""
    row, row_scales, _ = flatten(operands.rowwise)
    column, column_scales, _ = flatten(operands.columnwise)
    return row, column, row_scales, None if column_scales is row_scales else column_scales
