"""One call of dot product attention: from any format, mask and bias to a backend and back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.attention import formats
from transformer_engine.pytorch.attention.alibi import alibi_bias, check_slopes, default_slopes
from transformer_engine.pytorch.attention.choice import BIAS_TYPES, choose
from transformer_engine.pytorch.attention.masks import (
    Mask,
    MaskRule,
    Padding,
    Window,
    build_mask,
    check_arbitrary,
    mask_rule,
    padding_from_lengths,
    padding_from_masks,
)
from transformer_engine.pytorch.attention.recompute import recomputed
from transformer_engine.pytorch.attention.remember import remembered
from transformer_engine.pytorch.attention.sink import NO_SINK, Sink

AttentionMask = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Sequences(NamedTuple):
    """Where the sequences of one side (queries, or keys and values) are; see `formats.py`."""

    cu_seqlens: torch.Tensor | None = None
    cu_seqlens_padded: torch.Tensor | None = None
    longest: int | None = None


class Bias(NamedTuple):
    """What is added to the scores."""

    type: str = "no_bias"
    tensor: torch.Tensor | None = None
    slopes: torch.Tensor | None = None


_NO_BIAS = Bias()


def bias_of(type: str, tensor: torch.Tensor | None, slopes: torch.Tensor | None) -> Bias:
    """The bias of a call; the same one for all calls that have none."""
    if type == "no_bias" and tensor is None and slopes is None:
        return _NO_BIAS
    return Bias(type, tensor, slopes)


class Dropout(NamedTuple):
    """Dropout of attention weights, and the RNG states that it draws from."""

    p: float = 0.0
    tracker: Any = None


NO_DROPOUT = Dropout()


class CallShape(NamedTuple):
    """What settings and shapes alone say of a call.

    Attributes:
        qkv_format: format of all tensors.
        rule: mask type and window.
        band: the mask, where no tensor has a part in it.
        grouped: several query heads share a key head.
    """

    qkv_format: str
    rule: MaskRule
    band: Mask | None
    grouped: bool


@remembered
def call_shape(
    qkv_format: str,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    shapes: formats.Shapes,
    mask_type: str,
    window: Window | None,
    bottom_right: bool | None,
) -> CallShape:
    """Check settings and shapes; `heads`, `sizes` and `shapes` as in `formats.check_shapes`."""
    formats.check_format(qkv_format)
    rule = mask_rule(mask_type, window, bottom_right)
    formats.check_shapes(qkv_format, heads, sizes, shapes)
    band = None
    if not (rule.type.padding or rule.type.arbitrary or qkv_format == "thd"):
        sequence = 0 if qkv_format == "sbhd" else 1
        band = build_mask(rule, shapes[0][sequence], shapes[1][sequence])
    return CallShape(qkv_format, rule, band, heads[0] != heads[1])


class Call(NamedTuple):
    """All that a call of attention says, overrides applied."""

    shape: CallShape
    attention_mask: AttentionMask | None
    of_query: Sequences
    of_key: Sequences
    bias: Bias
    scale: float
    dropout: Dropout
    checkpoint: bool
    sink: Sink = NO_SINK


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
) -> torch.Tensor:
    """Attend in the call's format; the heads of the result are flat."""
    qkv_format, rule, _, _ = call.shape
    if qkv_format == "thd":
        return _packed_attention(query, key, value, call)
    query = formats.heads_first(query, qkv_format)
    key = formats.heads_first(key, qkv_format)
    value = formats.heads_first(value, qkv_format)
    padding = None
    if rule.type.padding:
        padding = _padding(call, query.shape[0], query.shape[2], key.shape[2])
    return formats.flat_heads(_attend(query, key, value, padding, call), qkv_format)


def _packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
) -> torch.Tensor:
    if not call.shape.rule.type.padding:
        raise ValueError(
            "[attention] expected a padding mask type (padding, padding_causal, ...) for"
            " qkv_format 'thd', whose sequences have unequal lengths"
        )
    of_query = _packed_rows(query, call.of_query, "cu_seqlens_q")
    of_key = (
        of_query
        if all(a is b for a, b in zip(call.of_query, call.of_key, strict=True))
        else _packed_rows(key, call.of_key, "cu_seqlens_kv")
    )
    if of_query.lengths.shape != of_key.lengths.shape:
        raise ValueError(
            "[attention] expected cu_seqlens_q and cu_seqlens_kv of equal shape, got"
            f" batches of {of_query.lengths.numel()} and {of_key.lengths.numel()}"
        )
    padding = padding_from_lengths(
        of_query.lengths, of_key.lengths, of_query.longest, of_key.longest
    )
    padded_query = formats.pad_sequences(query, of_query).transpose(1, 2)
    padded_key, padded_value = (
        formats.pad_sequences(x, of_key).transpose(1, 2) for x in (key, value)
    )
    out = _attend(padded_query, padded_key, padded_value, padding, call)
    return formats.pack_sequences(formats.flat_heads(out, "bshd"), of_query)


def _packed_rows(x: torch.Tensor, sequences: Sequences, parameter: str) -> formats.PackedRows:
    cu_seqlens = formats.check_cu_seqlens(sequences.cu_seqlens, parameter)
    padded = sequences.cu_seqlens_padded
    if padded is not None:
        formats.check_cu_seqlens(padded, f"{parameter}_padded")
    return formats.packed_rows(x.shape[0], cu_seqlens, padded, sequences.longest)


def _padding(call: Call, batch: int, queries: int, keys: int) -> Padding:
    of_query, of_key = call.of_query.cu_seqlens, call.of_key.cu_seqlens
    if of_query is not None and of_key is not None:
        lengths = formats.check_cu_seqlens(of_query, "cu_seqlens_q").diff()
        same = of_key is of_query
        key_lengths = lengths if same else formats.check_cu_seqlens(of_key, "cu_seqlens_kv").diff()
        if lengths.shape[0] != batch or key_lengths.shape[0] != batch:
            raise ValueError(
                f"[attention] expected cu_seqlens_q and cu_seqlens_kv of shape {(batch + 1,)}, got"
                f" {tuple(of_query.shape)} and {tuple(of_key.shape)}"
            )
        return padding_from_lengths(lengths, key_lengths, queries, keys)
    if call.attention_mask is None:
        raise ValueError(
            "[attention] expected attention_mask, or both cu_seqlens_q and cu_seqlens_kv, for a"
            " padding mask type, got neither"
        )
    return padding_from_masks(call.attention_mask, batch, queries, keys)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    padding: Padding | None,
    call: Call,
) -> torch.Tensor:
    """Attend in `[batch, heads, sequence, size]`."""
    _, rule, mask, grouped = call.shape
    bias = None
    if mask is None or call.bias is not _NO_BIAS:
        shape = (*query.shape[:3], key.shape[2])
        if mask is None:
            arbitrary = _arbitrary_mask(call.attention_mask, shape) if rule.type.arbitrary else None
            mask = build_mask(rule, shape[2], shape[3], padding, arbitrary)
        bias = _score_bias(call, shape, padding, query.device)
    empty = query.numel() == 0 or key.numel() == 0
    kind, sink = call.sink
    backend = choose(query.device.type, call.bias.type, grouped, empty, kind)
    if call.dropout.p == 0.0 and not call.checkpoint:
        return backend.attend(query, key, value, mask, call.scale, 0.0, bias, sink)
    attend = partial(_attend_randomly, backend.attend, (mask, call.scale), call.dropout)
    if call.checkpoint and backend.keeps_scores and torch.is_grad_enabled():
        return recomputed(attend, call.dropout.tracker, query, key, value, bias, sink)
    return attend(query, key, value, bias, sink)


def _attend_randomly(
    backend_attend: Callable[..., torch.Tensor],
    mask_and_scale: tuple[Mask, float],
    dropout: Dropout,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    if dropout.tracker is None:
        return backend_attend(query, key, value, *mask_and_scale, dropout.p, bias, sink)
    fork: AbstractContextManager[None] = dropout.tracker.fork()
    with fork:
        return backend_attend(query, key, value, *mask_and_scale, dropout.p, bias, sink)


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
    kind, bias, slopes = call.bias
    if kind == "no_bias" and bias is None and slopes is None:
        return None
    if kind not in BIAS_TYPES:
        known = ", ".join(BIAS_TYPES)
        raise ValueError(
            f"[attention] expected core_attention_bias_type in {{{known}}}, got {kind!r}"
        )
    takes_bias = kind in ("pre_scale_bias", "post_scale_bias")
    for name, tensor, wanted in (
        ("core_attention_bias", bias, takes_bias),
        ("alibi_slopes", slopes, kind == "alibi" and slopes is not None),
    ):
        if (tensor is not None) != wanted:
            raise ValueError(
                f"[attention] expected {name} to be {'a tensor' if wanted else 'None'} with"
                f" core_attention_bias_type={kind!r}, got {'None' if wanted else 'a tensor'}"
            )
    if bias is None:
        return _alibi(slopes, shape, padding, device)
    _check_bias(bias, shape)
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


def _check_bias(bias: torch.Tensor, shape: tuple[int, int, int, int]) -> None:
    fits = bias.dim() == 4 and all(
        size in (1, expected) for size, expected in zip(bias.shape, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"[attention] expected a core_attention_bias that broadcasts to {shape}"
            f" (batch, heads, queries, keys), got {tuple(bias.shape)}"
        )
