"""Quantising and dequantising as autograd functions, whose gradient is that of the identity."""

from __future__ import annotations

from typing import Any

import torch


class Quantize(torch.autograd.Function):
    """Quantises a tensor; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantizer: Any) -> Any:
        """Cast."""
        return quantizer.quantize(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The same."""
        return grad, None


class Dequantize(torch.autograd.Function):
    """Dequantises a tensor; the gradient is cast to the nominal dtype."""

    @staticmethod
    def forward(ctx: Any, x: Any, dtype: torch.dtype | None) -> torch.Tensor:
        """The values."""
        ctx.dtype = x.dtype
        return x.plain_values(dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The same, in the nominal dtype."""
        return grad.to(ctx.dtype), None
