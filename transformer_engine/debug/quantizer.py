"""Quantizers that let features look at a tensor or replace it.

An `InspectedQuantizer` wraps the quantizer of an operand, an `InspectedResult` that of the result
of a GEMM. The `Inspector` puts them into the plan of a call if a feature is due in the iteration.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from transformer_engine.debug.calls import FeatureCalls
from transformer_engine.debug.plans import Plan, TensorPlan
from transformer_engine.debug.statistics.quantizer import StatisticsQuantizer
from transformer_engine.debug.statistics.tensor import TensorStatistics
from transformer_engine.pytorch.fp8.casts.operands import (
    Fp8Matrix,
    OperandRequest,
    Operands,
    Side,
    transposed,
)
from transformer_engine.pytorch.fp8.casts.padding import pad, resized
from transformer_engine.pytorch.fp8.casts.quantizers import IDENTITY, Quantizer
from transformer_engine.pytorch.fp8.casts.wrapping import WrappingQuantizer
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.kernels.dropout_add import bias_gradient
from transformer_engine.pytorch.kernels.shapes import rows_of
from transformer_engine.pytorch.tensor import Float8BlockwiseQTensor, Float8Tensor, QuantizedTensor


class _Modified(Operands):
    """Operands, and by GEMM the tensors that features returned for them; cached for weights."""

    __slots__ = ("made",)

    def __init__(self, rowwise: Side | None, columnwise: Side | None, bias_grad: Any) -> None:
        super().__init__(rowwise, columnwise, bias_grad)
        self.made: dict[str, torch.Tensor] = {}


class InspectedQuantizer(WrappingQuantizer):
    """Makes the operands of an inspected tensor.

    The wrapped quantizer casts the sides that no feature modifies, also in fused kernels, so that
    inspection does not change a bit of them. Operands in high precision have the dtype `dtype`.
    `fp8` are the GEMMs that the recipe runs in FP8.
    """

    def __init__(
        self,
        inner: Quantizer,
        plan: TensorPlan,
        calls: FeatureCalls,
        dtype: torch.dtype,
        fp8: Sequence[str],
    ) -> None:
        assert plan.tensor.columnwise is not None
        self.statistics: TensorStatistics | None = None
        if isinstance(inner, StatisticsQuantizer):  # statistics are taken from the final operands
            self.statistics, inner = inner.statistics, inner.inner
        self.inner = inner
        self.rounds_once = inner.rounds_once
        self.calls_features, self.replaces = plan.calls, plan.modifies
        self.plan = plan
        self.calls = calls
        self.dtype = dtype
        self.default = inner.public()
        self.gemms = (plan.tensor.rowwise, plan.tensor.columnwise)
        # With `backward_override` Matmul decides what the backward reads of an operand of fprop.
        plain = plan.columnwise is Plan.HIGH_PRECISION and plan.tensor.columnwise not in fp8
        self.makes_columns = not (plain and plan.tensor.rowwise in fp8)

    @property
    def cache_key(self) -> Hashable:
        """Cached operands are valid for the same quantizer and the same plans of both sides.

        If the quantizer casts both sides, they are those of iterations without features, and valid
        there, too. A weight that no cast and no feature changes is valid in one iteration only:
        iterations without features do not cache it, and so would not renew it.
        """
        sides = (self.plan.rowwise, self.plan.columnwise)
        if sides == (Plan.FP8, Plan.FP8):
            return self.inner.cache_key
        unchanged = sides == (Plan.HIGH_PRECISION, Plan.HIGH_PRECISION)
        return (self.inner.cache_key, *sides, self.calls.iteration if unchanged else None)

    def for_recompute(self, scale: torch.Tensor | None) -> Quantizer:
        """Wrap the quantizer that repeats the casts of the forward."""
        again = super().for_recompute(scale)
        assert isinstance(again, InspectedQuantizer)
        again.default = again.inner.public()
        return again

    def persistent_tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the wrapped quantizer, and the rows of statistics."""
        rows = () if self.statistics is None else self.statistics.persistent_tensors()
        return (*self.inner.persistent_tensors(), *rows)

    def inner_request(self, request: OperandRequest) -> OperandRequest:
        """The request to the wrapped quantizer: the sides that the recipe casts."""
        rowwise = request.rowwise and self.plan.rowwise is Plan.FP8
        columnwise = request.columnwise and self.plan.columnwise is Plan.FP8
        quantizer = self.inner if rowwise or columnwise else IDENTITY
        return OperandRequest(quantizer, rowwise, columnwise, request.bias_grad)

    def operands(self, x: torch.Tensor, request: OperandRequest) -> Operands:
        """Cast the tensor, let features modify it, and let them inspect the result."""
        return self.padded(x, 0, request)

    def padded(self, x: torch.Tensor, padding: int, request: OperandRequest) -> Operands:
        """As `operands`, with padding, which features do not see."""
        return self._finish(x, self._cast(x, padding, request), request, padding)

    def refreshed(
        self, x: torch.Tensor, request: OperandRequest, cached: Operands | None
    ) -> Operands:
        """As `operands`, but features write into the row-wise tensor that they returned before.

        They do not write into a column-wise tensor, which a pending backward may still need.
        """
        outs = cached.made if isinstance(cached, _Modified) else {}
        return self._finish(x, self._cast(x, 0, request), request, 0, outs)

    def from_fp8(self, weight: Fp8Matrix, request: OperandRequest, dtype: torch.dtype) -> Operands:
        """As `operands`, for a weight that is kept in FP8: features get it dequantised."""
        x = dequantize(weight.codes, weight.format, weight.scales, dtype)
        inner, columnwise = self.inner_request(request), None
        if inner.columnwise:
            columnwise = transposed(weight)
        cast = Operands(weight if inner.rowwise else None, columnwise)
        return self._finish(x, cast, request, 0, fp8_weight=weight)

    def _cast(self, x: torch.Tensor, padding: int, request: OperandRequest) -> Operands:
        inner = self.inner_request(request)
        return inner.quantizer.padded(x, padding, inner)

    def finish(
        self, x: torch.Tensor | None, cast: torch.Tensor | Operands, request: OperandRequest
    ) -> Operands:
        """Let features modify and inspect a tensor that a fused kernel has cast."""
        assert x is not None
        return self._finish(x, cast if isinstance(cast, Operands) else Operands(x, x), request, 0)

    def _finish(
        self,
        x: torch.Tensor,
        cast: Operands,
        request: OperandRequest,
        padding: int,
        outs: dict[str, torch.Tensor] | None = None,
        fp8_weight: Fp8Matrix | None = None,
    ) -> Operands:
        plan, bias_grad = self.plan, cast.bias_grad
        if not (isinstance(cast.rowwise, Fp8Matrix) or isinstance(cast.columnwise, Fp8Matrix)):
            self.inner.record_amax(x)
        if request.bias_grad is not None and bias_grad is None and plan.modifies:
            # The bias gradient is the sum of the original gradient, not of the modified one.
            bias_grad = bias_gradient(x, request.bias_grad)
        result = _Modified(None, None, bias_grad)
        seen: list[torch.Tensor | None] = [None, None]
        quantized = None
        if plan.inspect or plan.inspect_rowwise or plan.inspect_columnwise:
            quantized = _as_tensor(x, cast, self.inner.public())
        # The documented order of calls is column-wise, then row-wise.
        if request.columnwise and self.makes_columns:
            result.columnwise, seen[1] = self._side(1, x, cast, padding, result.made, outs)
        if request.rowwise:
            result.rowwise, seen[0] = self._side(0, x, cast, padding, result.made, outs)
        self._show(x, [quantized if s is None else s for s in seen], request)
        if self.statistics is not None and fp8_weight is not None:
            self.statistics.feed_fp8_weight(fp8_weight, self.dtype, self.inner, values=x)
        elif self.statistics is not None:
            self.statistics.feed(x, result.rowwise, result.columnwise, self.inner)
        return result

    def _side(
        self,
        side: int,
        x: torch.Tensor,
        cast: Operands,
        padding: int,
        made: dict[str, torch.Tensor],
        outs: dict[str, torch.Tensor] | None,
    ) -> tuple[Side | None, torch.Tensor | None]:
        """Return one side's operand, and the tensor that features see (None: the recipe's cast)."""
        plan, gemm = (self.plan.rowwise, self.plan.columnwise)[side], self.gemms[side]
        if plan is Plan.FP8:
            return (cast.rowwise, cast.columnwise)[side], None
        if plan is Plan.HIGH_PRECISION:
            plain = x.to(self.dtype)
            return pad(plain, padding), plain
        out = (outs or {}).get(gemm) if side == 0 else None
        tensor = self.calls.modify(gemm, x, self.default, self.dtype, out)
        made[gemm] = tensor
        if isinstance(tensor, QuantizedTensor):
            return _matrix(tensor, side == 1, padding), tensor
        plain = self.calls.check_dtype(tensor, self.dtype, gemm).contiguous()
        return pad(plain, padding), tensor

    def _show(
        self, x: torch.Tensor, seen: list[torch.Tensor | None], request: OperandRequest
    ) -> None:
        plan = self.plan
        if plan.inspect:
            self.calls.inspect(x, seen[0], seen[1], self.default)
        if plan.inspect_rowwise and request.rowwise and seen[0] is not None:
            self.calls.inspect_after(self.gemms[0], seen[0], True)
        if plan.inspect_columnwise and request.columnwise and seen[1] is not None:
            self.calls.inspect_after(self.gemms[1], seen[1], False)

    def __repr__(self) -> str:
        sides = f"{self.plan.rowwise.value}, {self.plan.columnwise.value}"
        return f"InspectedQuantizer({self.plan.tensor.name}: {sides})"


class InspectedResult(Quantizer):
    """Lets features modify and inspect the result of a GEMM; `inner` takes statistics of it."""

    def __init__(self, inner: Quantizer, plan: TensorPlan, calls: FeatureCalls) -> None:
        self.inner = inner
        self.calls_features, self.replaces = plan.calls, plan.modifies
        self.plan = plan
        self.calls = calls

    def persistent_tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the wrapped quantizer."""
        return self.inner.persistent_tensors()

    def process_gemm_output(self, x: torch.Tensor) -> torch.Tensor:
        """Let features modify the result, then inspect it."""
        gemm = self.plan.tensor.rowwise
        if self.plan.rowwise is Plan.MODIFY:
            x = self.calls.check_dtype(self.calls.modify(gemm, x, None), x.dtype, gemm)
        x = self.inner.process_gemm_output(x)
        if self.plan.inspect:
            self.calls.inspect(x)
        if self.plan.inspect_rowwise:
            self.calls.inspect_after(gemm, x, True)
        return x


def _as_tensor(
    x: torch.Tensor, cast: Operands, quantizer: Quantizer | None
) -> QuantizedTensor | None:
    """Return the operands of `x` as a quantized tensor without padding; None if none is in FP8.

    `quantizer` is the public quantizer, which becomes an attribute of the tensor.
    """
    rows, cols = rows_of(x), x.shape[-1]
    rowwise = _resized_side(cast.rowwise, rows, cols)
    columnwise = _resized_side(cast.columnwise, cols, rows)
    some = rowwise or columnwise
    if some is None:
        return None
    kind = Float8BlockwiseQTensor if some.layout.in_blocks else Float8Tensor
    return kind.from_operands(Operands(rowwise, columnwise), x, quantizer)


def _resized_side(side: Side | None, rows: int, cols: int) -> Fp8Matrix | None:
    return resized(side, rows, cols) if isinstance(side, Fp8Matrix) else None


def _matrix(tensor: QuantizedTensor, columnwise: bool, padding: int) -> Fp8Matrix:
    """Return one side of a feature's tensor as an operand, with `padding` tokens of zeros added.

    Raises:
        ValueError: the tensor does not have that side.
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


def wrapping(
    inner: Quantizer, plan: TensorPlan, fp8: Sequence[str], calls: FeatureCalls, dtype: torch.dtype
) -> Quantizer:
    """The quantizer through which features see the tensor; `inner` if nothing is due."""
    if not plan.active(fp8):
        return inner
    if plan.tensor.is_operand:
        return InspectedQuantizer(inner, plan, calls, dtype, fp8)
    return InspectedResult(inner, plan, calls)
