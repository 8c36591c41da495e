"""Dropout as `torch.nn.functional.dropout` does it, as a pair of functions."""

from __future__ import annotations

import torch

_native_dropout_backward = torch.ops.aten.native_dropout_backward.default


def dropout(x: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements of x, each of them zero with probability p and the others divided by 1 - p.

    Returns:
        The result, and what the backward reads: factors of all elements, or a mask of bool.
    """
    if x.is_cuda and 0.0 < p < 1.0 and x.numel() > 0:
        return torch.native_dropout(x, p, True)
    if p == 1.0 or x.numel() == 0:
        factors = x.new_zeros(())
    else:
        factors = torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)
    return x * factors, factors


def dropout_backward(grad: torch.Tensor, factors: torch.Tensor, p: float) -> torch.Tensor:
    """The gradient of x."""
    if factors.dtype is torch.bool:
        return _native_dropout_backward(grad, factors, 1.0 / (1.0 - p))
    return grad * factors
