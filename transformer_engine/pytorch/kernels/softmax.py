"""Scaled, masked softmax of attention scores; a query that sees no key gets zeros."""

from __future__ import annotations

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.library import library_op


def _expanded(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if mask.shape[-1] > 1 and mask.stride(-1) != 1:
        mask = mask.contiguous()
    return mask.expand(x.shape)


@library_op()
def softmax_forward(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    left: int = -1,
    right: int = -1,
    diagonal: int = 0,
    *,
    launch: bool = True,
) -> torch.Tensor:
    """`softmax(scale * x)` over the last axis, of the keys that each query sees.

    Args:
        x: scores `[batch, heads, queries, keys]`, fp32, fp16 or bf16, contiguous.
        mask: bool, broadcastable to the shape of `x`; True = masked out.
        scale: factor on the scores.
        left: query `i` sees keys from `i + diagonal - left` on; negative for no limit.
        right: query `i` sees keys up to `i + diagonal + right`; negative for no limit.
        diagonal: 0 aligns the window top left, `keys - queries` bottom right.

    Returns:
        Weights of the shape and dtype of `x`; a row that sees no key is zero.
    """
    y = torch.empty_like(x)
    if launch:
        hidden = None if mask is None else _expanded(mask, x)
        _C.softmax_forward(x, hidden, scale, left, right, diagonal, y)
    return y


@library_op()
def softmax_backward(
    dy: torch.Tensor, y: torch.Tensor, scale: float, *, launch: bool = True
) -> torch.Tensor:
    """Gradient of the scores: `scale * y * (dy - sum(dy * y))`, with `y` from the forward."""
    dx = torch.empty_like(dy)
    if launch:
        _C.softmax_backward(dy, y, scale, dx)
    return dx
