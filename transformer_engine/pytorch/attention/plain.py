"""Attention between two projections without autograd: plain causal or full attention by cuDNN.

What it computes, and every bit of it, is what `DotProductAttention` does with the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from transformer_engine.pytorch.attention.backend import Backend
from transformer_engine.pytorch.attention.backends import cudnn
from transformer_engine.pytorch.attention.call import (
    NO_BIAS,
    NO_DROPOUT,
    Call,
    Sequences,
    call_shape,
)
from transformer_engine.pytorch.attention.choice import choose
from transformer_engine.pytorch.attention.environment import environment, repeatable
from transformer_engine.pytorch.attention.masks import Window
from transformer_engine.pytorch.attention.projections import HeadLayout, join_gradients, views
from transformer_engine.pytorch.attention.remember import remembered
from transformer_engine.pytorch.kernels.attention import attention_backward, attention_forward

if TYPE_CHECKING:
    from transformer_engine._env import AttentionVariables
    from transformer_engine.pytorch.attention.dot_product import DotProductAttention


class PlainAttention(NamedTuple):
    """Attention of a projection `[..., features]` that holds queries, keys and values.

    Attributes:
        layout: of the projection.
        settings: see `kernels/attention.py`.
        scale: factor on the scores.
    """

    layout: HeadLayout
    settings: tuple[int, ...]
    scale: float

    def forward(
        self, projection: torch.Tensor, recording: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The result `[..., heads * size]`, and statistics where a backward follows."""
        query, key, value = views(projection, self.layout)
        return attention_forward(
            query,
            key,
            value,
            self.settings,
            self.scale,
            0.0,
            cudnn.WHOLE,
            None,
            None,
            None,
            recording,
        )

    def backward(
        self,
        grad: torch.Tensor,
        projection: torch.Tensor,
        out: torch.Tensor,
        statistics: torch.Tensor,
    ) -> torch.Tensor:
        """The gradient of the projection; `grad` is contiguous."""
        query, key, value = views(projection, self.layout)
        gradients = attention_backward(
            grad,
            query,
            key,
            value,
            out,
            statistics,
            self.settings,
            self.scale,
            0.0,
            cudnn.WHOLE,
            None,
            None,
            None,
            False,
            False,
            True,
        )
        return join_gradients(gradients[:3], projection.shape, self.layout)


def plain_attention(
    module: DotProductAttention, layout: HeadLayout, x: torch.Tensor, recording: bool
) -> PlainAttention | None:
    """How a module would attend; None where it would do something else than the above.

    Args:
        module: whose `forward` gets no further arguments.
        layout: of the projection.
        x: `[..., any]`, with the tokens, dtype and device of the projection.
        recording: a backward follows.
    """
    if module.softmax_type != "vanilla" or (module.training and module.attention_dropout):
        return None
    allowed = environment()
    return _found(
        choose,
        module.qkv_format,
        (module.attn_mask_type, module.window_size, module.bottom_right_diagonal),
        module.softmax_scale,
        layout,
        (x.shape[:-1], x.dtype, x.device),
        (recording, module.training, repeatable(allowed)),
        allowed,
    )


@remembered
def _found(
    chosen_by: Callable[..., Backend],
    qkv_format: str,
    mask: tuple[str, Window | None, bool | None],
    scale: float,
    layout: HeadLayout,
    like: tuple[torch.Size, torch.dtype, torch.device],
    modes: tuple[bool, bool, bool],
    allowed: AttentionVariables,
) -> PlainAttention | None:
    heads, groups, size, interleaved = layout
    lead, dtype, device = like
    recording, training, repeats = modes
    if qkv_format == "thd" or (interleaved and heads != groups):
        return None  # sequences have lengths; parts are no views
    projection = torch.empty((*lead, (heads + 2 * groups) * size), dtype=dtype, device=device)
    query, key, value = parts = views(projection.requires_grad_(recording), layout)
    shapes = (query.shape, key.shape, value.shape)
    shape = call_shape(qkv_format, (heads, groups), (size, size), shapes, *mask)
    if shape.band is None:
        return None
    call = Call(
        shape, None, Sequences(), Sequences(), NO_BIAS, scale, NO_DROPOUT, False, training=training
    )
    if chosen_by(query, key, value, call) is not cudnn.BACKEND or not cudnn.readable(*parts):
        return None
    settings = cudnn.settings_for(shape, False, False, recording and repeats, (0, 0))
    return PlainAttention(layout, settings, scale)
