"""`WrappingQuantizer`: the base of quantizers that wrap another one, as the debugger does."""

from __future__ import annotations

import copy

import torch

from transformer_engine.pytorch.fp8.casts.operands import (
    FusedArguments,
    FusedOutputs,
    OperandRequest,
    Operands,
    PendingCast,
)
from transformer_engine.pytorch.fp8.casts.quantizers import Quantizer, Tensors


class WrappingQuantizer(Quantizer):
    """Calls another quantizer, `inner`.

    Fused kernels serve `inner_request`, the request of the wrapped quantizer, and also return the
    plain tensor if `needs_plain`. `finish` makes the operands for the GEMMs from both.
    """

    inner: Quantizer

    @property
    def needs_plain(self) -> bool:
        """Whether `finish` needs the plain tensor."""
        return True

    def inner_request(self, request: OperandRequest) -> OperandRequest:
        """The request that the wrapped quantizer serves."""
        raise NotImplementedError

    def finish(
        self, x: torch.Tensor | None, cast: torch.Tensor | Operands, request: OperandRequest
    ) -> Operands:
        """The operands of `x`; `cast` is the result of `inner_request`."""
        raise NotImplementedError

    def fused_arguments(self, request: OperandRequest | None) -> FusedArguments:
        """The arguments for the wrapped quantizer, plus the plain tensor if it is needed."""
        assert request is not None
        plain, inner = self.needs_plain, self.inner_request(request)
        fused = inner.quantizer.fused_arguments(inner)
        return fused._replace(plain=True) if plain else fused

    def fused_result(self, request: OperandRequest | None, made: FusedOutputs) -> Operands:
        """The result of the wrapped quantizer, finished."""
        assert request is not None
        inner = self.inner_request(request)
        cast = inner.quantizer.fused_result(inner, made)
        return self.finish(
            made.plain, cast.cast() if isinstance(cast, PendingCast) else cast, request
        )

    def for_recompute(self, scale: torch.Tensor | None) -> Quantizer:
        """A copy that wraps the recompute quantizer of the wrapped one."""
        copied = copy.copy(self)
        copied.inner = self.inner.for_recompute(scale)
        return copied

    def persistent_tensors(self) -> Tensors:
        """The persistent tensors of the wrapped quantizer."""
        return self.inner.persistent_tensors()
