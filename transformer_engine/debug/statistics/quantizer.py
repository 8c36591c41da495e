"""`StatisticsQuantizer`: a quantizer beside whose work statistics are taken."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from transformer_engine.pytorch.operands import Demand, Operands
from transformer_engine.pytorch.quantizers import Quantizer, WrappingQuantizer

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

    def inner_demand(self, demand: Demand) -> Demand:
        """All of it."""
        return Demand(self.inner, demand.rowwise, demand.columnwise, demand.bias_grad)

    def operands(self, x: torch.Tensor, demand: Demand) -> Operands:
        """Cast, and take statistics."""
        return self.finish(x, self.inner.operands(x, demand), demand)

    def padded(self, x: torch.Tensor, padding: int, demand: Demand) -> Operands:
        """The same; statistics leave the padding out."""
        return self.finish(x, self.inner.padded(x, padding, demand), demand)

    def refreshed(self, x: torch.Tensor, demand: Demand, cached: Operands | None) -> Operands:
        """The same."""
        return self.finish(x, self.inner.refreshed(x, demand, cached), demand)

    def finish(self, x: torch.Tensor, cast: torch.Tensor | Operands, demand: Demand) -> Operands:
        """Take statistics after a kernel has made both."""
        operands = cast if isinstance(cast, Operands) else Operands(x, x)
        rowwise, columnwise = operands.rowwise, operands.columnwise
        self.statistics.feed(x, rowwise, columnwise, self.inner, self.captured)
        return operands

    def note(self, x: torch.Tensor) -> None:
        """`x` goes by without a cast."""
        self.inner.note(x)
        self.statistics.feed_moments(x, self.captured)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        """The result of a GEMM goes by."""
        x = self.inner.result(x)
        self.statistics.feed_moments(x, self.captured)
        return x

    def __repr__(self) -> str:
        return f"StatisticsQuantizer({self.inner!r})"
