"""What happens to queries and keys between their projection and attention: norms and rotation."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
from transformer_engine.pytorch.module.l2norm import L2Normalization
from transformer_engine.pytorch.module.layernorm import LayerNorm
from transformer_engine.pytorch.module.rmsnorm import RMSNorm

RotaryAngles = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

_NORMS = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm, "L2Normalization": L2Normalization}


def head_norm(
    kind: str | None,
    size: int,
    eps: float,
    params_dtype: torch.dtype | None,
    device: torch.device | str | None,
    name: str,
) -> nn.Module | None:
    """A norm of queries or keys over the `size` elements of each head; None for no kind."""
    if kind is None:
        return None
    norm = _NORMS.get(kind)
    if norm is None:
        raise ValueError(
            f"[MultiheadAttention] expected qk_norm_type None or in {{{', '.join(_NORMS)}}},"
            f" got {kind!r} (layer {name})"
        )
    if norm is L2Normalization:
        return L2Normalization(size, eps)
    return norm(size, eps, params_dtype=params_dtype, device=device, name=name)


def pair_of(angles: RotaryAngles) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles of queries and of keys."""
    return (angles[0], angles[1]) if isinstance(angles, tuple | list) else (angles, angles)


def turned(
    query_key: tuple[torch.Tensor, torch.Tensor],
    angles: RotaryAngles,
    ends: tuple[torch.Tensor | None, torch.Tensor | None],
    inference_params: Any,
    layer_number: int | None,
    qkv_format: str,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys with rotary position embedding.

    Args:
        query_key: both, in the format.
        angles: of `RotaryPositionEmbedding`, or a pair for queries and keys.
        ends: where the packed sequences of each end.
        inference_params: positions start where its sequences are; None for zero.
        layer_number: who asks for them.
        qkv_format: of the tensors.
        interleaved: see `rope.py`.
    """
    query, key = query_key
    of_query, of_key = ends
    pair: tuple[torch.Tensor, ...] = pair_of(angles)
    starts = None
    if inference_params is not None:
        pair, starts, new_ends = inference_params.positions(pair, query, qkv_format, layer_number)
        of_query = new_ends if of_query is None else of_query
        of_key = new_ends if of_key is None else of_key
    turn = partial(
        apply_rotary_pos_emb,
        tensor_format=qkv_format,
        start_positions=starts,
        interleaved=interleaved,
        fused=True,
    )
    alike = pair[0] is pair[1] and of_query is of_key
    if inference_params is not None and alike and not torch.is_grad_enabled():
        both = _side_by_side(query, key)
        if both is not None:  # one launch, where the host has the most to do
            both = turn(both, pair[0], cu_seqlens=of_query)
            query, key = both.split((query.shape[-2], key.shape[-2]), -2)
            return query, key
    return turn(query, pair[0], cu_seqlens=of_query), turn(key, pair[1], cu_seqlens=of_key)


def _side_by_side(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Queries and keys as heads of one tensor, where a fused projection has laid them out so."""
    shape, strides = query.shape, query.stride()
    adjacent = (
        strides == key.stride()
        and strides[-2] == shape[-1]
        and key.dtype is query.dtype
        and key.data_ptr() == query.data_ptr() + shape[-2] * shape[-1] * query.itemsize
        and key.untyped_storage().data_ptr() == query.untyped_storage().data_ptr()
    )
    if not adjacent:
        return None
    return query.as_strided((*shape[:-2], shape[-2] + key.shape[-2], shape[-1]), strides)
