"""Attention between two projections without autograd: causal or full, by cuDNN, also with rotation.

What it computes, and every bit of it, is what `DotProductAttention` does with the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from transformer_engine.pytorch.attention.backends import cudnn
from transformer_engine.pytorch.attention.backends.backend import Backend
from transformer_engine.pytorch.attention.backends.choice import choose
from transformer_engine.pytorch.attention.core.call import (
    NO_BIAS,
    Call,
    Dropout,
    Sequences,
    call_shape,
)
from transformer_engine.pytorch.attention.core.environment import environment, repeatable
from transformer_engine.pytorch.attention.core.memoize import remembered
from transformer_engine.pytorch.attention.core.packed import Sizes, places_of
from transformer_engine.pytorch.attention.core.projections import HeadLayout, join_gradients, views
from transformer_engine.pytorch.attention.core.query_key import turned
from transformer_engine.pytorch.attention.masks.masks import Window
from transformer_engine.pytorch.attention.rope import turn_back
from transformer_engine.pytorch.dtypes import HIGH_PRECISION
from transformer_engine.pytorch.kernels.attention import (
    AS_INPUTS,
    NO_SEQUENCES,
    attention_backward,
    attention_forward,
)

if TYPE_CHECKING:
    from transformer_engine._env import AttentionVariables
    from transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention


_Options = tuple[tuple[int, ...], float, float, tuple[None, ...], None, None, torch.Tensor | None]
Kept = tuple[torch.Tensor | None, ...]  # turned query and key, value, statistics, seed


class Rotation(NamedTuple):
    """Rotary position embedding of queries and keys, each sequence from position 0.

    Attributes:
        of_query: angles, see `apply_rotary_pos_emb`.
        of_key: angles.
        interleaved: which elements are a pair.
    """

    of_query: torch.Tensor
    of_key: torch.Tensor
    interleaved: bool

    def turn(
        self, query: torch.Tensor, key: torch.Tensor, qkv_format: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, turned."""
        ends, how = (None, None), (None, None, qkv_format, self.interleaved)
        return turned((query, key), (self.of_query, self.of_key), ends, *how)

    def turn_back(self, query: Any, key: Any, qkv_format: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of both, from those of what `turn` returned."""
        return (
            turn_back(query, self.of_query, qkv_format, self.interleaved),
            turn_back(key, self.of_key, qkv_format, self.interleaved),
        )


class PlainAttention(NamedTuple):
    """Attention of a projection `[..., features]` that holds queries, keys and values.

    Attributes:
        layout: of the projection.
        places: sizes, strides and first element of queries, keys and values in it; none where not
            all of them are views.
        qkv_format: of the projection, `sbhd` or `bshd`.
        settings: see `kernels/attention.py`.
        scale: factor on the scores.
        dropout: probability of dropping a weight.
    """

    layout: HeadLayout
    places: tuple[tuple[Sizes, Sizes, int], ...]
    qkv_format: str
    settings: tuple[int, ...]
    scale: float
    dropout: float

    def _options(self, seed: torch.Tensor | None) -> _Options:
        """Settings, scale and dropout; no sequences, no bias, no sink; the seed."""
        return self.settings, self.scale, self.dropout, NO_SEQUENCES, None, None, seed

    def forward(
        self, projection: torch.Tensor, rotation: Rotation | None, recording: bool
    ) -> tuple[torch.Tensor, Kept]:
        """The result `[..., heads * size]`, and what backward reads if it is `recording`.

        The projection is contiguous and a tensor of its own.
        """
        query, key, value = [projection.as_strided(*place) for place in self.places] or views(
            projection, self.layout
        )
        if rotation is not None:
            query, key = rotation.turn(query, key, self.qkv_format)
        seed = cudnn.new_seed(query.device) if self.dropout else None
        out, statistics = attention_forward(query, key, value, *self._options(seed), recording)
        return out, (query, key, value, statistics, seed)

    def backward(
        self,
        grad: torch.Tensor,
        out: torch.Tensor,
        kept: Sequence[Any],
        rotation: Rotation | None,
    ) -> torch.Tensor:
        """The gradient of the projection; `grad` is contiguous."""
        query, key, value, statistics, seed = kept
        of_query, of_key, of_value, *_ = attention_backward(
            grad, query, key, value, out, statistics, *self._options(seed), False, False, AS_INPUTS
        )
        if rotation is not None:
            of_query, of_key = rotation.turn_back(of_query, of_key, self.qkv_format)
        return join_gradients((of_query, of_key, of_value), self.layout)


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
    dropout = module.attention_dropout if module.training else 0.0
    tracked = dropout and module.get_rng_state_tracker is not None
    if module.softmax_type != "vanilla" or tracked:
        return None
    allowed = environment()
    return _found(
        choose,
        module.qkv_format,
        (module.attn_mask_type, module.window_size, module.bottom_right_diagonal),
        (module.softmax_scale, dropout),
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
    factors: tuple[float, float],
    layout: HeadLayout,
    like: tuple[torch.Size, torch.dtype, torch.device],
    modes: tuple[bool, bool, bool],
    allowed: AttentionVariables,
) -> PlainAttention | None:
    heads, groups, size, _ = layout
    lead, dtype, device = like
    recording, training, repeats = modes
    scale, dropout = factors
    if qkv_format == "thd" or dtype not in HIGH_PRECISION:
        return None  # sequences of thd have lengths; other dtypes are an error of the projection
    projection = torch.empty((*lead, (heads + 2 * groups) * size), dtype=dtype, device=device)
    query, key, value = parts = views(projection.requires_grad_(recording), layout)
    shapes = (query.shape, key.shape, value.shape)
    shape = call_shape(qkv_format, (heads, groups), (size, size), shapes, *mask)
    if shape.band is None:
        return None
    call = Call(
        shape,
        None,
        Sequences(),
        Sequences(),
        NO_BIAS,
        scale,
        Dropout(dropout),
        False,
        training=training,
    )
    if chosen_by(query, key, value, call) is not cudnn.BACKEND or not all(cudnn.reads(*parts)):
        return None
    settings = cudnn.settings_for(shape, False, False, recording and repeats, (0, 0))
    places = places_of(*parts)
    where = () if places is None else places.parts
    return PlainAttention(layout, where, qkv_format, settings, scale, dropout)
