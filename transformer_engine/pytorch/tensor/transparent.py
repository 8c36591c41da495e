"""Quantising and dequantising as autograd sees them: identities."""

from __future__ import annotations

from typing import Any

import torch


class Quantize(torch.autograd.Function):
    """A tensor as its quantizer makes it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantizer: Any) -> Any:
        """Cast."""
        return quantizer.quantize(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The same."""
        return grad, None


class Dequantize(torch.autograd.Function):
    """The values of a quantised tensor, in a dtype."""

    @staticmethod
    def forward(ctx: Any, x: Any, dtype: torch.dtype | None) -> torch.Tensor:
        """The values."""
        ctx.dtype = x.dtype
        return x.plain_values(dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The same, in the nominal dtype."""
        return grad.to(ctx.dtype), None
