"""FP8 attention of ranks that share sequences: query, key and value are cast before they are sent.

    forward     query, key and value are cast to FP8 codes, which the scheme sends; the merged
                result is cast
    backward    the gradient of the result is cast; the gradients of query, key and value are summed
                in fp32 over all parts and ranks, and cast once after that

If cuDNN computes the parts (`cudnn_fp8`), its forward multiplies codes. The result of each part is
FP8, and the results are merged in 16 bit. The backward is that of 16-bit attention, on the values
that the codes stand for, and casts nothing.

Otherwise the parts take the values that the codes stand for, and the scheme runs in fp32 between
the casts. Compared with one process (`backends/unfused_fp8.py`) only the softmax weights differ.
The forward casts the weights of the softmax over the keys of one part, and multiplies the result of
the part by the share that the part has of the whole softmax. The backward casts the weights of the
softmax over all keys. The derivative of the softmax subtracts a mean, which the backward computes
as the sum of `d result * result`, with the merged result before its cast; one process computes that
mean as a sum over unrounded weights.
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
    calls carry the scales of these codes, see `Casts.with_codes`. These scales are saved for the
    backward, because the scales of the module may have been updated by then.
    """
    backward_in_fp8 = cast_gradients(backward)

    def cast_forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, needs: Needs
    ) -> tuple[torch.Tensor, Saved | None]:
        if call.casts is None:
            return forward(query, key, value, call, needs)
        dtype = query.dtype
        casts = call.casts._replace(dtype=dtype_of_parts(query, call, needs))
        (query, key, value), casts = casts.with_codes((query, key, value))
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


def dtype_of_parts(query: torch.Tensor, call: Call, needs: Needs) -> torch.dtype:
    """The `Casts.dtype` of a call in FP8: 16 bit if cuDNN can compute its parts, else fp32.

    Parts have no sink.

    Raises:
        ValueError: no backend takes the call.
    """
    part = call._replace(context=None, part=True, sink=NO_SINK)
    dtype = cudnn_fp8.sixteen_bit(query.dtype)
    backend = choose(query.device, dtype, any(needs), part)
    return dtype if backend is cudnn_fp8.BACKEND else torch.float32
