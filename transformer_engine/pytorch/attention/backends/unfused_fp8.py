"""FP8 attention as it is defined: every tensor that a matrix product takes is rounded to FP8.

    q8, k8, v8 = FP8(query), FP8(key), FP8(value)       d query, key, value = FP8(dq8, dk8, dv8)
    product    = q8 k8^T                                dq8, dk8 from FP8(d product)
    s8         = FP8(dropout(softmax(scale * product + bias)))
    out        = FP8(s8 v8)                             ds8, dv8 from FP8(d out)

`FP8(x)` casts a tensor to FP8 and back at once. All else is fp32: the products, the softmax and its
derivative. So masks, biases, sinks and formats are those of attention in high precision, and so is
the time that it takes.
"""

from __future__ import annotations

import torch

from transformer_engine.pytorch.attention.backends.backend import (
    Backward,
    Gradients,
    Needs,
    Saved,
)
from transformer_engine.pytorch.attention.backends.dense import dense
from transformer_engine.pytorch.attention.backends.scores import KERNEL
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.attention.core.casts import Slot

_forward, _backward = dense(KERNEL)


def _cast(x: torch.Tensor, slot: Slot | None, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if slot is None else slot.cast(x, dtype)


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, needs: Needs
) -> tuple[torch.Tensor, Saved | None]:
    """See `backends/__init__.py`."""
    casts, dtype = call.casts, query.dtype
    assert casts is not None
    query, key, value = (casts.qkv.cast(x, torch.float32) for x in (query, key, value))
    out, saved = _forward(query, key, value, call, needs)
    return casts.out.cast(out, dtype), saved


def cast_gradients(inner: Backward) -> Backward:
    """The backward of FP8 attention, made of a backward that computes in `Casts.dtype`.

    The gradient of the result is cast to FP8 and back before `inner` takes it, and so are the
    gradients of query, key and value that `inner` returns. If the backward is in high precision,
    nothing is cast.
    """

    def backward(grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
        casts, dtype = call.casts, grad.dtype
        assert casts is not None
        found = inner(_cast(grad, casts.grad_out, casts.dtype), saved, call, needs)
        inputs = [x if x is None else _cast(x, casts.grad_qkv, dtype) for x in found[:3]]
        query, key, value = inputs
        return Gradients(query, key, value, found.bias, found.sink)

    return backward


backward = cast_gradients(_backward)
