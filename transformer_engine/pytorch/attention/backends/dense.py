"""The way to backends that see `[batch, heads, sequence, size]` and a mask of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from transformer_engine.pytorch.attention.core import formats
from transformer_engine.pytorch.attention.core.call import (
    NO_BIAS,
    AttentionMask,
    Call,
    Sequences,
)
from transformer_engine.pytorch.attention.masks.alibi import (
    alibi_bias,
    check_slopes,
    default_slopes,
)
from transformer_engine.pytorch.attention.masks.masks import (
    Padding,
    build_mask,
    check_arbitrary,
    padding_from_lengths,
    padding_from_masks,
)

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Call], torch.Tensor]


def dense(kernel: Callable[..., torch.Tensor]) -> Attend:
    """A backend's `attend` (see `backends/__init__.py`) from a kernel.

    Args:
        kernel: `kernel(query, key, value, mask, scale, dropout, bias, sink)`. query is
            `[batch, heads, queries, size]`, key and value are `[batch, groups, keys, size]`, of any
            strides; mask is a `Mask`; bias (or None) broadcasts to `[batch, heads, queries, keys]`
            and is added to the scaled scores; sink (or None) is `[heads]`, see `sink.py`. The
            result is `[batch, heads, queries, size of value]`, of any strides.
    """

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
    ) -> torch.Tensor:
        shape = call.shape
        qkv_format = shape.qkv_format
        if qkv_format == "thd":
            return _packed(kernel, query, key, value, call)
        query = formats.heads_first(query, qkv_format)
        key = formats.heads_first(key, qkv_format)
        value = formats.heads_first(value, qkv_format)
        if shape.band is not None and call.bias is NO_BIAS:
            out = kernel(
                query, key, value, shape.band, call.scale, call.dropout.p, None, call.sink.offset
            )
        else:
            padding = None
            if shape.rule.type.padding:
                padding = padding_of(call, query.shape[0], query.shape[2], key.shape[2])
            out = _masked(kernel, query, key, value, padding, call)
        return formats.flat_heads(out, qkv_format)

    return attend


def _packed(
    kernel: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
) -> torch.Tensor:
    of_query = _packed_rows(query, call.of_query, "cu_seqlens_q")
    of_key = of_query if call.same_sequences else _packed_rows(key, call.of_key, "cu_seqlens_kv")
    formats.check_equal_batch(of_query.lengths.numel(), of_key.lengths.numel())
    padding = padding_from_lengths(
        of_query.lengths, of_key.lengths, of_query.longest, of_key.longest
    )
    padded_query = formats.pad_sequences(query, of_query).transpose(1, 2)
    padded_key, padded_value = (
        formats.pad_sequences(x, of_key).transpose(1, 2) for x in (key, value)
    )
    out = _masked(kernel, padded_query, padded_key, padded_value, padding, call)
    return formats.pack_sequences(formats.flat_heads(out, "bshd"), of_query)


def _packed_rows(x: torch.Tensor, sequences: Sequences, parameter: str) -> formats.PackedRows:
    cu_seqlens, padded = sequences.checked(parameter)
    formats.check_ends(x.shape[0], cu_seqlens, padded, sequences.longest, parameter)
    return formats.packed_rows(x.shape[0], cu_seqlens, padded, sequences.longest)


def padding_of(call: Call, batch: int, queries: int, keys: int) -> Padding:
    """The padding of sbhd and bshd, from lengths where given, else from masks."""
    of_query, of_key = call.of_query.cu_seqlens, call.of_key.cu_seqlens
    if of_query is not None and of_key is not None:
        formats.check_cu_seqlens(of_query, "cu_seqlens_q")
        formats.check_cu_seqlens(of_key, "cu_seqlens_kv")
        formats.check_batch(batch, of_query, of_key)
        formats.check_lengths(queries, of_query, "cu_seqlens_q")
        formats.check_lengths(keys, of_key, "cu_seqlens_kv")
        lengths = of_query.diff()
        key_lengths = lengths if of_key is of_query else of_key.diff()
        return padding_from_lengths(lengths, key_lengths, queries, keys)
    if call.attention_mask is None:
        given = [
            name
            for name, ends in (("cu_seqlens_q", of_query), ("cu_seqlens_kv", of_key))
            if ends is not None
        ]
        raise ValueError(
            "[attention] expected attention_mask, or both cu_seqlens_q and cu_seqlens_kv, for a"
            f" padding mask type, got {given[0] + ' alone' if given else 'none of them'}"
        )
    return padding_from_masks(call.attention_mask, batch, queries, keys)


def _masked(
    kernel: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    padding: Padding | None,
    call: Call,
) -> torch.Tensor:
    """Attend in `[batch, heads, sequence, size]` with a mask or bias made of tensors."""
    rule, mask = call.shape.rule, call.shape.band
    shape = (*query.shape[:3], key.shape[2])
    if mask is None:
        arbitrary = _arbitrary_mask(call.attention_mask, shape) if rule.type.arbitrary else None
        mask = build_mask(rule, shape[2], shape[3], padding, arbitrary)
    bias = _score_bias(call, shape, padding, query.device)
    return kernel(query, key, value, mask, call.scale, call.dropout.p, bias, call.sink.offset)


def _arbitrary_mask(
    attention_mask: AttentionMask | None, shape: tuple[int, int, int, int]
) -> torch.Tensor:
    if attention_mask is None:
        raise ValueError(
            "[attention] expected attention_mask for the mask type 'arbitrary', got None"
        )
    return check_arbitrary(attention_mask, shape)


def _score_bias(
    call: Call,
    shape: tuple[int, int, int, int],
    padding: Padding | None,
    device: torch.device,
) -> torch.Tensor | None:
    """What is added to the scaled scores; broadcasts to `shape`."""
    if call.bias is NO_BIAS:
        return None
    kind, bias, slopes = call.bias
    if bias is None:
        return _alibi(slopes, shape, padding, device)
    check_bias_shape(bias, shape)
    return bias * call.scale if kind == "pre_scale_bias" else bias


def _alibi(
    slopes: torch.Tensor | None,
    shape: tuple[int, int, int, int],
    padding: Padding | None,
    device: torch.device,
) -> torch.Tensor:
    batch, heads, queries, keys = shape
    per_head = default_slopes(heads, device)
    if slopes is not None:
        per_head = check_slopes(slopes, batch, heads)
    shift = keys - queries if padding is None else padding.shift()
    return alibi_bias(per_head, queries, keys, 0 if shift is None else shift)


def check_bias_shape(bias: torch.Tensor, shape: tuple[int, int, int, int]) -> None:
    """ValueError unless a bias broadcasts to `[batch, heads, queries, keys]`."""
    fits = bias.dim() == 4 and all(
        size in (1, expected) for size, expected in zip(bias.shape, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"[attention] expected a core_attention_bias that broadcasts to {shape}"
            f" (batch, heads, queries, keys), got {tuple(bias.shape)}"
        )
