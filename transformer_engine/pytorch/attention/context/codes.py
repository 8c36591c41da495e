"""FP8 attention of ranks that share sequences: query, key and value are cast before they are sent.

    forward     FP8 codes of query, key and value, which a scheme sends; the merged result, cast
    backward    the gradient of the result, cast; gradients of query, key and value, cast once after
                the sum over all parts and ranks, which is fp32

Where cuDNN computes parts (`cudnn_fp8`), it multiplies codes in the forward. Results of parts are
FP8, and merged in 16 bit. The backward is one in 16 bit of the values of codes, without casts.

Elsewhere parts take values, and between the casts a scheme runs in fp32. Of all that attention in
FP8 casts, see `backends/unfused_fp8.py`, only weights differ: the forward casts those of the
softmax over the keys of a part, and multiplies the result of the part by its share. The backward
casts those over all keys. It takes the sum of `d result * result`, with the merged result before
its cast, for the mean that the derivative of the softmax subtracts; in one process that is a sum of
unrounded weights.
"""

from __future__ import annotations

import torch

from transformer_engine.pytorch.attention.backends import cudnn_fp8
from transformer_engine.pytorch.attention.backends.backend import (
    Backward,
    Forward,
    Gradients,
    Needs,
    Saved,
)
from transformer_engine.pytorch.attention.backends.choice import choose
from transformer_engine.pytorch.attention.backends.unfused_fp8 import cast_gradients
from transformer_engine.pytorch.attention.core.call import NO_SINK, Call


def with_casts(forward: Forward, backward: Backward) -> tuple[Forward, Backward]:
    """The functions of a scheme for calls in high precision and in FP8.

    In FP8 `forward` takes codes of query, key and value, and returns a result in `Casts.dtype`;
    calls carry the scales of these codes, see `Casts.with_codes`. By the backward the scales of the
    module have moved on: those of the forward are saved.
    """
    backward_in_fp8 = cast_gradients(backward)

    def cast_forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, needs: Needs
    ) -> tuple[torch.Tensor, Saved | None]:
        if call.casts is None:
            return forward(query, key, value, call, needs)
        dtype = query.dtype
        casts = call.casts._replace(dtype=_dtype_of_parts(query, call, needs))
        (query, key, value), casts = casts.with_codes((query, key, value))
        with torch.autocast(query.device.type, enabled=False):
            out, saved = forward(query, key, value, call._replace(casts=casts), needs)
        out = casts.out.cast(out, dtype)
        if saved is None:
            return out, None
        return out, saved.wrap((casts.qkv_scales, casts.softmax.scale.clone()), casts.dtype)

    def cast_backward(grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
        if call.casts is None:
            return backward(grad, saved, call, needs)
        inner, (qkv_scales, softmax_scale), dtype = saved.unwrap()
        softmax = call.casts.softmax._replace(scale=softmax_scale, amax=None)
        casts = call.casts._replace(qkv_scales=qkv_scales, softmax=softmax, dtype=dtype)
        if casts.by_cudnn:
            casts = casts.without_backward()
        return backward_in_fp8(grad, inner, call._replace(casts=casts), needs)

    return cast_forward, cast_backward


def _dtype_of_parts(query: torch.Tensor, call: Call, needs: Needs) -> torch.dtype:
    """`Casts.dtype` of the call: whether cuDNN takes parts with its mask. Parts have no sink."""
    assert call.casts is not None
    if call.casts.calibrating:
        return torch.float32
    part = call._replace(context=None, part=True, sink=NO_SINK)
    dtype = cudnn_fp8.sixteen_bit(query.dtype)
    backend = choose(query.device, dtype, any(needs), part)
    return dtype if backend is cudnn_fp8.BACKEND else torch.float32
