"""The quantizer of calibration: high precision, and amaxes with which FP8 can start."""

from __future__ import annotations

import torch

from transformer_engine.pytorch.fp8.casts.operands import OperandRequest, Operands
from transformer_engine.pytorch.fp8.casts.quantizers import (
    IDENTITY,
    IdentityQuantizer,
    Quantizer,
    Tensors,
)
from transformer_engine.pytorch.kernels.amax import amax as amax_of


class CalibratingQuantizer(IdentityQuantizer):
    """High precision that records `max |x|`, so that FP8 can start from a known scale."""

    def __init__(self, amax: torch.Tensor) -> None:
        self.amax = amax

    def operands(self, x: torch.Tensor, request: OperandRequest) -> Operands:
        """Both sides are `x`; its amax replaces the running one."""
        self.record_amax(x)
        return super().operands(x, request)

    def record_amax(self, x: torch.Tensor) -> None:
        """Replace the running amax by that of `x`."""
        self.amax.copy_(amax_of(x))

    def for_recompute(self, scale: torch.Tensor | None) -> Quantizer:
        """The identity: a recompute records no amax."""
        return IDENTITY

    def persistent_tensors(self) -> Tensors:
        """The amax."""
        return (self.amax,)
