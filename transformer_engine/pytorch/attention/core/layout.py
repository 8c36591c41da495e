"""How queries, keys and values lie in memory.

In the name of a layout, `3` or `2` marks the axis along which a packed tensor was split, and `_`
separates tensors that have separate memory:

    sb3hd             query, key, value = qkv.unbind(2), qkv [sequence, batch, 3, heads, size]
    sbh3d             query, key, value = qkv.unbind(3), qkv [sequence, batch, heads, 3, size]
    sbhd_sb2hd        key, value = kv.unbind(2), kv [sequence, batch, 2, heads, size]
    sbhd_sbh2d        key, value = kv.unbind(3), kv [sequence, batch, heads, 2, size]
    sbhd_sbhd_sbhd    three tensors

The names for bshd and thd are formed in the same way. Attention takes all layouts without a copy,
because it takes views.
"""

from __future__ import annotations

import torch

from transformer_engine.pytorch._torch_private import same_storage
from transformer_engine.pytorch.attention.core.formats import check_format


def _get_qkv_layout(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qkv_format: str = "sbhd"
) -> str:
    """The memory layout of queries, keys and values, found from storage, offsets and strides.

    If two layouts are the same memory, because a size is 1, the first one of the list above counts.

    Args:
        q: `[sequence, batch, heads, size]`, `[batch, sequence, heads, size]` or
            `[tokens, heads, size]`, as `qkv_format` says.
        k: as `q`, but with its own sequence length and number of heads.
        v: as `k`.
        qkv_format: `sbhd`, `bshd` or `thd`.

    Raises:
        ValueError: a tensor of another rank, or memory that is none of the layouts.

    Example:
        >>> q, k, v = torch.randn(16, 2, 3, 4, 8).unbind(2)
        >>> _get_qkv_layout(q, k, v, "sbhd")
        'sb3hd'
    """
    lead = check_format(qkv_format)[:-2]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != len(qkv_format):
            raise ValueError(
                f"[_get_qkv_layout] expected {name} of {len(qkv_format)} dimensions for qkv_format"
                f" {qkv_format!r}, got shape {tuple(x.shape)}"
            )
    for parts, before in (((q, k, v), ""), ((k, v), f"{qkv_format}_")):
        if before and not q.is_contiguous():
            break
        for layout, axis in ((f"{lead}{len(parts)}hd", -3), (f"{lead}h{len(parts)}d", -2)):
            if _packed(parts, axis):
                return before + layout
    if all(x.is_contiguous() for x in (q, k, v)):
        return "_".join([qkv_format] * 3)
    raise ValueError(
        "[_get_qkv_layout] expected contiguous tensors, or views of a contiguous packed tensor that"
        f" {lead}3hd, {lead}h3d, {qkv_format}_{lead}2hd or {qkv_format}_{lead}h2d describes, got"
        f" q {_described(q)}, k {_described(k)}, v {_described(v)}"
    )


def _packed(parts: tuple[torch.Tensor, ...], axis: int) -> bool:
    """Whether the parts are `packed.unbind(axis)` of a contiguous tensor."""
    first = parts[0]
    if not all(_same_but_offset(first, part) for part in parts[1:]):
        return False
    shape = list(first.shape)
    shape.insert(len(shape) + 1 + axis, len(parts))
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    step = strides.pop(axis)
    begins = first.storage_offset()
    return all(part.storage_offset() == begins + i * step for i, part in enumerate(parts)) and all(
        size == 1 or stride == expected
        for size, stride, expected in zip(first.shape, first.stride(), strides, strict=True)
    )


def _same_but_offset(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype is b.dtype
        and a.shape == b.shape
        and same_storage(a, b)
        and a.stride() == b.stride()
    )


def _described(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} with strides {tuple(x.stride())} at {x.storage_offset()}"
