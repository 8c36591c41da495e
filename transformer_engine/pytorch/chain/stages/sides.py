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
from transformer_engine.pytorch.fp8.casts.watched import Watched
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.kernels.memory import strides_of
from transformer_engine.pytorch.tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.quantized_tensor import rowwise_of


def flatten(side: Side | None) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Values or codes, scales, and the format of codes (else -1)."""
    if isinstance(side, Fp8Matrix):
        return side.codes, side.scales, side.format
    return side, None, -1


def saved_input(
    x: Any, operands: Operands, plan: MatmulPlan
) -> tuple[torch.Tensor | None, torch.Tensor | None, int, bool]:
    """What a Matmul saves of its input, as `flatten` returns it.

    The last element says whether the backward gathers or computes the input again instead.
    """
    if plan.omits_input:
        _, scales, format = flatten(operands.rowwise)
        return None, scales, format, True
    regathered = operands.columnwise is None and not isinstance(x, torch.Tensor)
    original = plan.input_in_backward is not None and not regathered
    side = x if original else operands.columnwise
    return *flatten(side if plan.needs_weight else None), regathered


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


def columnwise_of(weight: Side | None, other: Side | None, dtype: torch.dtype) -> Side:
    """The side of a weight kept in FP8 that dgrad takes, made only for this GEMM.

    It is the transpose of the codes if the other operand is FP8, else the values in `dtype`.
    """
    assert isinstance(weight, Fp8Matrix)
    if isinstance(other, Fp8Matrix):
        return transposed(weight)
    return dequantize(weight.codes, weight.format, weight.scales, dtype)


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
