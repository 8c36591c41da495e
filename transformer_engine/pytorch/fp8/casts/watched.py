"""Casts of shards that the debugger watches: it also needs the whole tensor in high precision.

With sequence parallelism a norm rounds its fp32 result to FP8, and the codes are gathered. The
debugger must not change them, so the codes are gathered beside the tensor: a cast of the gathered
tensor would round twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.fp8.casts.operands import (
    Fp8Matrix,
    OperandRequest,
    Operands,
    transposed,
)
from transformer_engine.pytorch.fp8.casts.padding import pad_operands
from transformer_engine.pytorch.fp8.casts.quantizers import Quantizer
from transformer_engine.pytorch.fp8.casts.wrapping import WrappingQuantizer
from transformer_engine.pytorch.kernels.moments import moments


class WatchedShards(WrappingQuantizer):
    """Makes `Operands` of the row-wise codes of a shard, and of the shard in high precision.

    Args:
        inner: casts the shard to the codes of the whole tensor.
    """

    def __init__(self, inner: Quantizer) -> None:
        self.inner = inner
        self.shard_rows = inner.shard_rows
        self.native = inner.native

    def inner_request(self, request: OperandRequest) -> OperandRequest:
        """The row-wise codes."""
        return OperandRequest(self.inner, True, False)

    def finish(
        self, x: torch.Tensor | None, cast: torch.Tensor | Operands, request: OperandRequest
    ) -> Operands:
        """The codes and the tensor."""
        assert isinstance(cast, Operands)
        return Operands(cast.rowwise, x)


def watched_shards(watcher: WrappingQuantizer, group: Any) -> WatchedShards | None:
    """The quantizer of shards for a watched tensor; None if the whole tensor is cast alike."""
    inner = watcher.inner.of_shards(group) if watcher.rounds_once else None
    return None if inner is None else WatchedShards(inner)


class Watched(NamedTuple):
    """All ranks' rows of a tensor, in high precision and as row-wise codes."""

    plain: torch.Tensor
    codes: Fp8Matrix

    def operands(self, watcher: Any, padding: int, request: OperandRequest) -> Operands:
        """The operands of the tensor, which the watcher has seen.

        Args:
            watcher: the `WrappingQuantizer` of the tensor.
            padding: number of tokens of zeros to add to the codes.
            request: the request to the watcher.
        """
        inner = watcher.inner_request(request)
        if inner.moments is not None:
            moments(self.plain, inner.moments, inner.active)
        cast = pad_operands(Operands(self.codes, None), padding)
        assert isinstance(cast.rowwise, Fp8Matrix)
        if request.columnwise:
            cast.columnwise = transposed(cast.rowwise)
        return watcher.finish(self.plain, cast, request)
