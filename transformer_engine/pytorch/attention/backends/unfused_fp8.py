"""FP8 attention as it is defined: every tensor that a matrix product takes is one that FP8 holds.

    q8, k8, v8 = FP8(query), FP8(key), FP8(value)       d query, key, value = FP8(dq8, dk8, dv8)
    product    = q8 k8^T                                dq8, dk8 from FP8(d product)
    s8         = FP8(dropout(softmax(scale * product + bias)))
    out        = FP8(s8 v8)                             ds8, dv8 from FP8(d out)

Sums, softmax and its derivative are fp32. Values are cast and taken back at once, so masks, biases,
sinks and formats are those of attention in high precision, and so is the time it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from transformer_engine.pytorch._torch_private import once_differentiable
from transformer_engine.pytorch.attention.backends.dense import dense
from transformer_engine.pytorch.attention.backends.scores import product, weighted, weights
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.attention.core.casts import Casts, Slot
from transformer_engine.pytorch.attention.masks.masks import Mask


class _CastInputs(torch.autograd.Function):
    """query, key and value in fp32 with the values of FP8; their gradients likewise."""

    @staticmethod
    def forward(ctx: Any, casts: Casts, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.casts, ctx.dtype = casts, inputs[0].dtype
        ctx.set_materialize_grads(False)
        results = tuple(casts.qkv.cast(x, torch.float32) for x in inputs)
        needs = zip(results, ctx.needs_input_grad[1:], strict=True)
        frozen = [x for x, needed in needs if not needed]
        if frozen:
            ctx.mark_non_differentiable(*frozen)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        slot: Slot | None = ctx.casts.grad_qkv
        results = tuple(g if g is None else _cast(g, slot, ctx.dtype) for g in grads)
        if ctx.casts.step is not None:
            ctx.casts.step.end_backward()
        return None, *results


class _Cast(torch.autograd.Function):
    """A tensor cast by one slot, its gradient by another; None does not cast."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, slot: Slot | None, of_grad: Slot | None, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.slot, ctx.dtype = of_grad, x.dtype
        return x.view_as(x) if slot is None else slot.cast(x, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _cast(grad, ctx.slot, ctx.dtype), None, None, None


def _cast(x: torch.Tensor, slot: Slot | None, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if slot is None else slot.cast(x, dtype)


def _kernel(casts: Casts) -> Callable[..., torch.Tensor]:
    """What `dense` makes a backend of."""

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Mask,
        scale: float,
        dropout: float,
        bias: torch.Tensor | None,
        sink: torch.Tensor | None,
    ) -> torch.Tensor:
        fp32 = torch.float32
        scores = _Cast.apply(product(query, key, 1.0), None, casts.grad_product, fp32) * scale
        probabilities = weights(scores, mask, bias, sink)
        if dropout > 0.0:
            probabilities = torch.nn.functional.dropout(probabilities, dropout)
        return weighted(_Cast.apply(probabilities, casts.softmax, None, fp32), value)

    return attend


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, casts: Casts
) -> torch.Tensor:
    """See `backends/__init__.py`; with these casts."""
    dtype = query.dtype
    if torch.compiler.is_compiling():  # it takes no tensor twice
        query, key, value = (x.view_as(x) for x in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):  # which would round what FP8 rounds
        query, key, value = _CastInputs.apply(casts, query, key, value)
        out = dense(_kernel(casts))(query, key, value, call)
        result: torch.Tensor = _Cast.apply(out, casts.out, casts.grad_out, dtype)
    return result
