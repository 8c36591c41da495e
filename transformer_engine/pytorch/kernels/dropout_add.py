"""Bias, dropout and residual in one pass; the backward draws the same random numbers again."""

from __future__ import annotations

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.library import library_op
from transformer_engine.pytorch.kernels.memory import new_empty


@library_op()
def dropout_add_forward(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    seed: torch.Tensor | None,
    p: float,
    *,
    launch: bool = True,
) -> torch.Tensor:
    """`residual + dropout(x + bias)`, in fp32 with one rounding.

    Args:
        x: fp32, fp16 or bf16, contiguous.
        bias: `[cols]`, dtype of `x`.
        residual: shape of `x`, fp32, fp16 or bf16; its dtype is the result's.
        seed: int64 `[1]` on the device of `x`; None where `p == 0`. The same seed drops the same
            elements, on every device.
        p: probability of dropping an element, `0 <= p < 1`, rounded up to a multiple of 2^-16. The
            other elements are multiplied by `1 / (1 - p)` with the rounded `p`.
    """
    out = new_empty(x, x.shape, x.dtype if residual is None else residual.dtype)
    if launch:
        _C.dropout_add_forward(x, bias, residual, seed, p, out)
    return out


@library_op()
def dropout_add_backward(
    dout: torch.Tensor,
    seed: torch.Tensor | None,
    p: float,
    dx: torch.dtype | None,
    dbias: torch.dtype | None,
    *,
    launch: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of `x` and of the bias; the residual's is `dout` itself.

    Args:
        dout: gradient of the result, contiguous.
        seed: the forward's seed.
        p: the forward's probability.
        dx: dtype of `x`; None where its gradient is not needed (or, with `p == 0`, is `dout`).
        dbias: dtype of the bias; None for no bias gradient.
    """
    cols = dout.shape[-1]
    data_grad = None if dx is None else new_empty(dout, dout.shape, dx)
    bias_grad = None if dbias is None else dout.new_empty(cols, dtype=dbias)
    if launch and (data_grad is not None or bias_grad is not None):
        _C.dropout_add_backward(dout, seed, p, data_grad, bias_grad)
    return data_grad, bias_grad


def bias_gradient(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of a bias `[cols]`: column sums of the contiguous `grad` `[..., cols]`."""
    summed = dropout_add_backward(grad, None, 0.0, None, dtype)[1]
    assert summed is not None
    return summed
