"""`StatisticsQuantizer`: a quantizer beside whose work statistics are taken."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from transformer_engine.pytorch.fp8.operands import Fp8Matrix, OperandRequest, Operands
from transformer_engine.pytorch.fp8.quantizers import Quantizer, WrappingQuantizer

if TYPE_CHECKING:
    from transformer_engine.debug.statistics.tensor import TensorStatistics


class StatisticsQuantizer(WrappingQuantizer):
    """Does what `inner` does, and feeds the rows of a tensor. No bit of any result changes."""

    replaces = False

    def __init__(
        self, inner: Quantizer, statistics: TensorStatistics, captured: bool = False
    ) -> None:
        self.inner = inner
        self.statistics = statistics
        self.captured = captured
        self.scaling = inner.scaling
        self.format = inner.format
        self.rounds_once = inner.rounds_once

    @property
    def cache_key(self) -> Hashable:
        """Cached weights are those of the wrapped quantizer."""
        return self.inner.cache_key

    @property
    def needs_plain(self) -> bool:
        """Casts are compared with what was cast; moments are taken by the kernel."""
        return self.statistics.wants_tensor(self.captured)

    def inner_request(self, request: OperandRequest, numel: int = 0) -> OperandRequest:
        """All of it, and the moments."""
        row, active = self.statistics.moments_row(numel, self.captured)
        sides = request.rowwise, request.columnwise
        return OperandRequest(self.inner, *sides, request.bias_grad, row, active)

    def operands(self, x: torch.Tensor, request: OperandRequest) -> Operands:
        """Cast, and take statistics."""
        inner = self.inner_request(request, x.numel())
        return self.finish(x, self.inner.operands(x, inner), request)

    def padded(self, x: torch.Tensor, padding: int, request: OperandRequest) -> Operands:
        """The same; statistics leave the padding out."""
        if not padding:
            return self.operands(x, request)
        self.statistics.feed_moments(x, self.captured)
        return self.finish(x, self.inner.padded(x, padding, request), request)

    def refreshed(
        self, x: torch.Tensor, request: OperandRequest, cached: Operands | None
    ) -> Operands:
        """The same."""
        inner = self.inner_request(request, x.numel())
        return self.finish(x, self.inner.refreshed(x, inner, cached), request)

    def from_fp8(self, weight: Fp8Matrix, request: OperandRequest, dtype: torch.dtype) -> Operands:
        """The weight as it is; its values are dequantised where they are looked at."""
        self.statistics.feed_fp8_weight(weight, dtype, self.inner, self.captured)
        return self.inner.from_fp8(weight, request, dtype)

    def finish(
        self, x: torch.Tensor | None, cast: torch.Tensor | Operands, request: OperandRequest
    ) -> Operands:
        """What is left to do after a kernel that has taken the moments."""
        operands = cast if isinstance(cast, Operands) else Operands(cast, cast)
        if x is not None:
            self.statistics.feed_blocks(x, self.captured)
            rowwise, columnwise = operands.rowwise, operands.columnwise
            self.statistics.feed_casts(x, rowwise, columnwise, self.inner, self.captured)
        return operands

    def record_amax(self, x: torch.Tensor) -> None:
        """Also of the wrapped quantizer."""
        self.inner.record_amax(x)
        self._look(x)

    def process_gemm_output(self, x: torch.Tensor) -> torch.Tensor:
        """Take statistics of the result."""
        x = self.inner.process_gemm_output(x)
        self._look(x)
        return x

    def persistent_tensors(self) -> tuple[torch.Tensor, ...]:
        """Those of the wrapped quantizer, and the rows."""
        return (*self.inner.persistent_tensors(), *self.statistics.persistent_tensors())

    def _look(self, x: torch.Tensor) -> None:
        self.statistics.feed_moments(x, self.captured)
        self.statistics.feed_blocks(x, self.captured)

    def __repr__(self) -> str:
        return f"StatisticsQuantizer({self.inner!r})"
