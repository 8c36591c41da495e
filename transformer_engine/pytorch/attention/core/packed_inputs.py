"""Queries, keys and values that a call gives in one packed tensor or in two."""

from __future__ import annotations

from typing import Any

from transformer_engine.pytorch.module.inputs import check_tensors

_PARTS = (-3, -2)  # in front of the heads, or behind them


def unpacked(
    query: Any, key: Any, value: Any, qkv: Any, kv: Any, interleave_dim: int
) -> tuple[Any, Any, Any]:
    """Query, key and value as views.

    Args:
        query: queries, or None if they are in `qkv`.
        key: None.
        value: None.
        qkv: all three, `[..., 3, heads, size]` or `[..., heads, 3, size]`, or None.
        kv: keys and values, `[..., 2, heads, size]` or `[..., heads, 2, size]`, or None.
        interleave_dim: the dimension of 3 or 2: -3 or -2.

    Raises:
        ValueError: a tensor is given twice or misses, or a dimension does not fit.
        TypeError: a packed tensor that is no tensor.
    """
    tensors = {"query_layer": query, "key_layer": key, "value_layer": value}
    tensors |= {"qkv_layer": qkv, "kv_layer": kv}
    names = [name for name, x in tensors.items() if x is not None]
    if names not in (["qkv_layer"], ["query_layer", "kv_layer"]):
        raise ValueError(
            "[DotProductAttention] expected qkv_layer alone, or query_layer and kv_layer, got"
            f" {', '.join(names)}"
        )
    if interleave_dim not in _PARTS:
        raise ValueError(
            f"[DotProductAttention] expected qkv_interleave_dim -3 or -2, got {interleave_dim!r}"
        )
    name, parts = names[-1], 2 if qkv is None else 3
    packed = tensors[name]
    check_tensors("DotProductAttention", **{name: packed})
    if packed.dim() < -interleave_dim or packed.shape[interleave_dim] != parts:
        raise ValueError(
            f"[DotProductAttention] expected {name} of {parts} parts along dimension"
            f" {interleave_dim}, got {tuple(packed.shape)}"
        )
    views = packed.unbind(interleave_dim)
    return views if qkv is not None else (query, *views)
