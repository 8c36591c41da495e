"""`StatisticsQuantizer`: wraps a quantizer and takes statistics of its tensor."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from transformer_engine.pytorch.fp8.casts.operands import Fp8Matrix, OperandRequest, Operands
from transformer_engine.pytorch.fp8.casts.quantizers import Quantizer
from transformer_engine.pytorch.fp8.casts.wrapping import WrappingQuantizer

if TYPE_CHECKING:
    from transformer_engine.debug.statistics.tensor import TensorStatistics


class WatchingQuantizer(WrappingQuantizer):
    """Base of quantizers that cast by `inner` and look at the tensor without changing results."""

    def __init__(self, inner: Quantizer) -> None:
        self.inner = inner
        self.scaling = inner.scaling
        self.format = inner.format
        self.rounds_once = inner.rounds_once

    @property
    def cache_key(self) -> Hashable:
        """The key of the wrapped quantizer: statistics do not change what is cached."""
        return self.inner.cache_key

    def look(self, x: torch.Tensor) -> None:
        """Take statistics of a tensor that is not cast."""
        raise NotImplementedError

    def record_amax(self, x: torch.Tensor) -> None:
        """Let the wrapped quantizer record the amax, and take statistics."""
        self.inner.record_amax(x)
        self.look(x)

    def process_gemm_output(self, x: torch.Tensor) -> torch.Tensor:
        """Take statistics of the result of a GEMM."""
        x = self.inner.process_gemm_output(x)
        self.look(x)
        return x


class StatisticsQuantizer(WatchingQuantizer):
    """Takes the statistics that are due for the tensor, in the kernel of the cast if possible."""

    def __init__(
        self, inner: Quantizer, statistics: TensorStatistics, captured: bool = False
    ) -> None:
        super().__init__(inner)
        self.statistics = statistics
        self.captured = captured

    @property
    def needs_plain(self) -> bool:
        """Whether statistics need the tensor in high precision beside its operands."""
        return self.statistics.wants_tensor(self.captured)

    def inner_request(self, request: OperandRequest, numel: int = 0) -> OperandRequest:
        """The same request, to the wrapped quantizer, whose kernel takes the moments, too."""
        row, active = self.statistics.moments_row(numel, self.captured)
        sides = request.rowwise, request.columnwise
        return OperandRequest(self.inner, *sides, request.bias_grad, row, active)

    def operands(self, x: torch.Tensor, request: OperandRequest) -> Operands:
        """Cast, and take statistics."""
        inner = self.inner_request(request, x.numel())
        return self.finish(x, self.inner.operands(x, inner), request)

    def padded(self, x: torch.Tensor, padding: int, request: OperandRequest) -> Operands:
        """Cast with padding; statistics are taken without it."""
        if not padding:
            return self.operands(x, request)
        self.statistics.feed_moments(x, self.captured)
        return self.finish(x, self.inner.padded(x, padding, request), request)

    def refreshed(
        self, x: torch.Tensor, request: OperandRequest, cached: Operands | None
    ) -> Operands:
        """Cast into cached operands, and take statistics."""
        inner = self.inner_request(request, x.numel())
        return self.finish(x, self.inner.refreshed(x, inner, cached), request)

    def from_fp8(self, weight: Fp8Matrix, request: OperandRequest, dtype: torch.dtype) -> Operands:
        """Make operands of a weight kept in FP8; dequantise it if statistics need values."""
        self.statistics.feed_fp8_weight(weight, dtype, self.inner, self.captured)
        return self.inner.from_fp8(weight, request, dtype)

    def finish(
        self, x: torch.Tensor | None, cast: torch.Tensor | Operands, request: OperandRequest
    ) -> Operands:
        """Take the statistics that the kernel of the cast has not taken."""
        operands = cast if isinstance(cast, Operands) else Operands(cast, cast)
        if x is not None:
            self.statistics.feed_blocks(x, self.captured)
            rowwise, columnwise = operands.rowwise, operands.columnwise
            self.statistics.feed_casts(x, rowwise, columnwise, self.inner, self.captured)
        return operands

    def persistent_tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the wrapped quantizer, and the rows of statistics."""
        return (*self.inner.persistent_tensors(), *self.statistics.persistent_tensors())

    def look(self, x: torch.Tensor) -> None:
        """Take the moments and dynamic ranges of a tensor that is not cast."""
        self.statistics.feed_moments(x, self.captured)
        self.statistics.feed_blocks(x, self.captured)

    def __repr__(self) -> str:
        return f"StatisticsQuantizer({self.inner!r})"
