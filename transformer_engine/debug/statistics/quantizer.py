"""`StatisticsQuantizer`: a quantizer beside whose work statistics are taken."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from transformer_engine.pytorch.fp8.operands import Demand, Fp8Matrix, Operands
from transformer_engine.pytorch.fp8.quantizers import Quantizer, WrappingQuantizer

if TYPE_CHECKING:
    from transformer_engine.debug.statistics.tensor import TensorStatistics


class StatisticsQuantizer(WrappingQuantizer):
    """Does what `inner` does, and feeds the rows of a tensor. No bit of any result changes.

    Args:
        inner: the tensor's quantizer; the identity for results of GEMMs.
        statistics: of the tensor.
        captured: this is for a graph that is being captured.
    """

    replaces = False

    def __init__(
        self, inner: Quantizer, statistics: TensorStatistics, captured: bool = False
    ) -> None:
        self.inner = inner
        self.statistics = statistics
        self.captured = captured
        self.scaling = inner.scaling
        self.format = inner.format

    @property
    def cache_key(self) -> Hashable:
        """Cached weights are those of the wrapped quantizer."""
        return self.inner.cache_key

    @property
    def needs_plain(self) -> bool:
        """Casts are compared with what was cast; moments are taken by the kernel."""
        return self.statistics.wants_tensor(self.captured)

    def inner_demand(self, demand: Demand, numel: int = 0) -> Demand:
        """All of it, and the moments."""
        row, active = self.statistics.moments_row(numel, self.captured)
        sides = demand.rowwise, demand.columnwise
        return Demand(self.inner, *sides, demand.bias_grad, row, active)

    def operands(self, x: torch.Tensor, demand: Demand) -> Operands:
        """Cast, and take statistics."""
        inner = self.inner_demand(demand, x.numel())
        return self.finish(x, self.inner.operands(x, inner), demand)

    def padded(self, x: torch.Tensor, padding: int, demand: Demand) -> Operands:
        """The same; statistics leave the padding out."""
        if not padding:
            return self.operands(x, demand)
        self.statistics.feed_moments(x, self.captured)
        return self.finish(x, self.inner.padded(x, padding, demand), demand)

    def refreshed(self, x: torch.Tensor, demand: Demand, cached: Operands | None) -> Operands:
        """The same."""
        inner = self.inner_demand(demand, x.numel())
        return self.finish(x, self.inner.refreshed(x, inner, cached), demand)

    def kept(self, weight: Fp8Matrix, demand: Demand, dtype: torch.dtype) -> Operands:
        """The weight as it is; its values are dequantised where they are looked at."""
        self.statistics.feed_kept(weight, dtype, self.inner, self.captured)
        return self.inner.kept(weight, demand, dtype)

    def finish(
        self, x: torch.Tensor | None, cast: torch.Tensor | Operands, demand: Demand
    ) -> Operands:
        """What is left to do after a kernel that has taken the moments."""
        operands = cast if isinstance(cast, Operands) else Operands(cast, cast)
        if x is not None:
            self.statistics.feed_blocks(x, self.captured)
            rowwise, columnwise = operands.rowwise, operands.columnwise
            self.statistics.feed_casts(x, rowwise, columnwise, self.inner, self.captured)
        return operands

    def note(self, x: torch.Tensor) -> None:
        """`x` goes by without a cast."""
        self.inner.note(x)
        self._look(x)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        """The result of a GEMM goes by."""
        x = self.inner.result(x)
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
