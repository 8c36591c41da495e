"""Statistics in compiled graphs, taken by operators of the graph.

A graph is traced once and runs in many iterations. It has an operator for every tensor whose
statistics may be due in some iteration. When the operator runs, it looks up its `Feed` by a name
and decides which statistics are due, as in eager mode. In a CUDA graph, flags on the device decide
(see `buffer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from transformer_engine.debug.names import TENSORS
from transformer_engine.debug.statistics.quantizer import WatchingQuantizer
from transformer_engine.debug.statistics.tensor import TensorStatistics
from transformer_engine.pytorch._torch_private import constant_in_graphs, graph_task, real_object
from transformer_engine.pytorch.capture import is_capturing
from transformer_engine.pytorch.fp8.casts.operands import Fp8Matrix, OperandRequest, Operands, Side
from transformer_engine.pytorch.fp8.casts.quantizers import (
    IDENTITY,
    Fp8Quantizer,
    GemmQuantizers,
    Quantizer,
)
from transformer_engine.pytorch.fp8.inspector import show_to_inspector
from transformer_engine.pytorch.fp8.process_state import process_state

Parts: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None, int]  # codes, scales, format
_OF_FORWARD = ("activation", "weight", "output")


@dataclass
class Feed:
    """What an operator of a graph needs to take the statistics of its tensor.

    If a layer has statistics of its backward alone, a `ForwardMark` notes its forwards.
    """

    statistics: TensorStatistics
    forwards: dict[str, int]  # by layer, the iteration of its last forward in training
    unlogged: Sequence[Any]  # features of the tensor whose use is not in the debug log yet
    quantizer: Quantizer  # has the scaling and the format of the cast in the graph
    dtype: torch.dtype  # dtype of activations
    evaluating: bool  # see `TensorStatistics.enter`

    def take(self, x: torch.Tensor | None, rowwise: Parts, columnwise: Parts) -> None:
        """Take what is due; for the arguments see `fp8.inspector.show_to_inspector`."""
        statistics, captured = self.statistics, is_capturing()
        if statistics.tensor in _OF_FORWARD:
            if graph_task() != -1:
                return  # a backward recomputes this forward
            if not captured:
                statistics.enter(self.evaluating)
                if not self.evaluating:
                    self.forwards[statistics.layer] = statistics.iteration
        if not (statistics.due or captured):
            if statistics.layer in self.forwards:
                statistics.check_forward(self.forwards[statistics.layer])
            return
        if self.unlogged:
            log = process_state().inspector.log_statistics
            self.unlogged = log(statistics.layer, statistics.tensor, self.unlogged)
        rows, columns = _matrix(*rowwise), _matrix(*columnwise)
        if x is not None:
            statistics.feed(x, rows, columns, self.quantizer, captured)
        elif rows is not None:
            statistics.feed_fp8_weight(rows, self.dtype, self.quantizer, captured)


@dataclass
class ForwardMark:
    """Notes the iteration of the forwards of a layer that has statistics of its backward alone."""

    statistics: TensorStatistics  # of a tensor of the backward
    forwards: dict[str, int]  # see `Feed`

    def take(self, x: torch.Tensor | None, rowwise: Parts, columnwise: Parts) -> None:
        """Called in the forward, with a tensor that is not read."""
        if graph_task() == -1 and not is_capturing():
            self.forwards[self.statistics.layer] = self.statistics.iteration


Taker: TypeAlias = Feed | ForwardMark


def _matrix(
    codes: torch.Tensor | None, scales: torch.Tensor | None, format: int
) -> Fp8Matrix | None:
    return None if codes is None or scales is None else Fp8Matrix(codes, scales, format)


def _parts(side: Side | None) -> Parts:
    if isinstance(side, Fp8Matrix):
        return side.codes, side.scales, side.format
    return None, None, -1


class TracedStatistics(WatchingQuantizer):
    """Adds an operator to the traced graph that takes statistics of the tensor."""

    def __init__(self, inner: Quantizer, feed: str) -> None:
        super().__init__(inner)
        self.feed = feed

    def inner_request(self, request: OperandRequest) -> OperandRequest:
        """The same request, to the wrapped quantizer."""
        return OperandRequest(self.inner, request.rowwise, request.columnwise, request.bias_grad)

    def operands(self, x: torch.Tensor, request: OperandRequest) -> Operands:
        """Cast, and take statistics."""
        return self.finish(x, self.inner.operands(x, self.inner_request(request)), request)

    def padded(self, x: torch.Tensor, padding: int, request: OperandRequest) -> Operands:
        """Cast with padding; statistics are taken without it."""
        return self.finish(x, self.inner.padded(x, padding, self.inner_request(request)), request)

    def refreshed(
        self, x: torch.Tensor, request: OperandRequest, cached: Operands | None
    ) -> Operands:
        """Cast into cached operands, and take statistics."""
        return self.finish(x, self.inner.refreshed(x, self.inner_request(request), cached), request)

    def from_fp8(self, weight: Fp8Matrix, request: OperandRequest, dtype: torch.dtype) -> Operands:
        """Make operands of a weight kept in FP8, and take statistics."""
        self.look(None, weight)
        return self.inner.from_fp8(weight, self.inner_request(request), dtype)

    def finish(
        self, x: torch.Tensor | None, cast: torch.Tensor | Operands, request: OperandRequest
    ) -> Operands:
        """Take the statistics of a tensor that a fused kernel has cast."""
        operands = cast if isinstance(cast, Operands) else Operands(cast, cast)
        self.look(x, operands.rowwise, operands.columnwise)
        return operands

    def look(
        self, x: torch.Tensor | None, rowwise: Side | None = None, columnwise: Side | None = None
    ) -> None:
        """Add the operator, for a tensor and its operands."""
        show_to_inspector(x, *_parts(rowwise), *_parts(columnwise), self.feed)

    def __repr__(self) -> str:
        return f"TracedStatistics({self.inner!r}, {self.feed})"


class LayerInGraph(NamedTuple):
    """Facts about a layer that are constants of a graph.

    Attributes:
        layer: name of the layer.
        device: device of the parameters.
        dtype: dtype of activations.
        session: name of the session for which the graph is traced.
        evaluating: calls of the layer are evaluation, not training.
        tp_group: tensor parallel group of the layer.
        tp_size: number of ranks of `tp_group`.
        replicated: names of the tensors that are the same on all ranks of `tp_group`.
    """

    layer: str
    device: torch.device
    dtype: torch.dtype
    session: str
    evaluating: bool
    tp_group: Any
    tp_size: int
    replicated: Sequence[str]


def traced(about: LayerInGraph, quantizers: GemmQuantizers) -> GemmQuantizers:
    """Return the quantizers of a layer for a graph that is being traced.

    Raises:
        RuntimeError: a feature that needs Python is selected for the layer.
    """
    _enter(about.layer, quantizers.fp8_gemms, about.session)
    feeds: dict[str, str] = {}
    for tensor in TENSORS:
        inner: Quantizer = getattr(quantizers, tensor.quantizer)
        feeds[tensor.name] = _feed(tensor.name, inner.scaling, inner.format, *about)
    of_backward = [name for name in feeds if feeds[name] and name not in _OF_FORWARD]
    if of_backward and not about.evaluating and not any([feeds[name] for name in _OF_FORWARD]):
        feeds["output"] = _mark(of_backward[0], *about)
    wrapped: dict[str, Quantizer] = {}
    for tensor in TENSORS:
        inner, feed = getattr(quantizers, tensor.quantizer), feeds[tensor.name]
        wrapped[tensor.quantizer] = TracedStatistics(inner, feed) if feed else inner
    return quantizers.replaced(wrapped)


@constant_in_graphs
def _enter(layer: str, fp8: Sequence[str], session: str) -> None:
    process_state().inspector.enter_graph(layer, fp8)


@constant_in_graphs
def _feed(tensor: str, scaling: str, format: int, *about: Any) -> str:
    """Register the `Feed` of a tensor and return its name; "" if no statistic is ever due."""
    inspector = process_state().inspector
    layer, device, dtype, session, evaluating, tp_group, tp_size, replicated = about
    ranks = (real_object(tp_group), tp_size, tensor in replicated)
    statistics, features = inspector.statistics_of(layer, tensor, device, *ranks)
    if statistics is None:
        return ""
    quantizer: Quantizer = IDENTITY
    if scaling:
        quantizer = Fp8Quantizer(format)
        quantizer.scaling = scaling
    name = f"{layer}, {tensor}, {device}, {dtype}, {scaling} {format}, {evaluating}, {session}"
    if name not in inspector.feeds:
        statistics.in_graph = True
        forwards = inspector.statistics.forwards
        feed = Feed(statistics, forwards, features, quantizer, dtype, evaluating)
        inspector.feeds[name] = feed
    return name


@constant_in_graphs
def _mark(tensor: str, *about: Any) -> str:
    """Register the `ForwardMark` of a layer with statistics of `tensor`, and return its name."""
    inspector = process_state().inspector
    layer, device, _, session, _, tp_group, tp_size, replicated = about
    ranks = (real_object(tp_group), tp_size, tensor in replicated)
    statistics, _ = inspector.statistics_of(layer, tensor, device, *ranks)
    name = f"{layer}, forward, {device}, {session}"
    inspector.feeds[name] = ForwardMark(statistics, inspector.statistics.forwards)
    return name
