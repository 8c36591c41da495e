"""residual + dropout(x + bias): the end of every block of a transformer layer, in one kernel."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch._torch_private import apply_of, once_differentiable
from transformer_engine.pytorch.export.onnx import exporting
from transformer_engine.pytorch.kernels.dropout_add import (
    dropout_add_backward,
    dropout_add_forward,
)


def drawn_and_added(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, p: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `kernels.dropout_add.dropout_add_forward` returns, and the seed; None where `p == 0`."""
    # Drawn on the device by torch's generator: a captured graph draws anew at each replay.
    seed = torch.randint(2**63 - 1, (1,), device=x.device) if p > 0.0 else None
    return dropout_add_forward(x, bias, residual, seed, p), seed


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        p: float,
    ) -> torch.Tensor:
        ctx.p = p
        ctx.dtype = x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        out, seed = drawn_and_added(x, bias, residual, p)
        ctx.save_for_backward(seed)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (seed,) = ctx.saved_tensors
        grad = grad.contiguous()
        needs_x, needs_bias, needs_residual, _ = ctx.needs_input_grad
        same = ctx.p == 0.0 and ctx.dtype == grad.dtype
        x_grad, bias_grad = dropout_add_backward(
            grad,
            seed,
            ctx.p,
            ctx.dtype if needs_x and not same else None,
            ctx.bias_dtype if needs_bias else None,
        )
        return (
            grad if needs_x and same else x_grad,
            bias_grad,
            grad if needs_residual else None,
            None,
        )


_apply = apply_of(_DropoutAdd)


def dropout_add(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, p: float
) -> torch.Tensor:
    """`residual + dropout(x + bias)` in the dtype of the residual (of `x` without one).

    Args:
        x: `[..., cols]`.
        bias: `[cols]`.
        residual: shape of `x`.
        p: probability of dropping an element, 0 <= p < 1; 0 where not training.
    """
    if p == 0.0 and bias is None:
        if residual is None:
            return x
        if residual.dtype in (x.dtype, torch.float32):
            return residual + x
    if exporting():  # dropout has been refused
        total = x.float() if bias is None else x.float() + bias.float()
        return total.to(x.dtype) if residual is None else (residual + total).to(residual.dtype)
    out: torch.Tensor = _apply(x.contiguous(), bias, residual, p)
    return out
