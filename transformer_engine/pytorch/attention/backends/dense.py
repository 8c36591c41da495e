"""Adapter to kernels that take `[batch, heads, sequence, size]` and a dense mask.

Tensors in thd are padded to `[batch, longest sequence]` before the kernel runs, and its results are
packed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from transformer_engine.pytorch.attention.backends.backend import (
    Backward,
    Forward,
    Gradients,
    Inputs,
    KernelParts,
    Needs,
    Parts,
    Saved,
)
from transformer_engine.pytorch.attention.core import formats
from transformer_engine.pytorch.attention.core.call import NO_BIAS, Call, Sequences
from transformer_engine.pytorch.attention.masks.alibi import (
    alibi_bias,
    check_slopes,
    default_slopes,
)
from transformer_engine.pytorch.attention.masks.masks import (
    Mask,
    Padding,
    build_mask,
    check_arbitrary,
    check_broadcasts,
    padding_from_lengths,
    padding_from_masks,
)


class Kernel(NamedTuple):
    """Attention of `[batch, heads, sequence, size]`, as a pair of functions.

    Attributes:
        forward: `forward((query, key, value), mask, bias, call, needs) -> out, Saved or None`.
            query is `[batch, heads, queries, size]`, key and value are `[batch, groups, keys,
            size]`, of any strides; mask is a `Mask`; bias (or None) broadcasts to `[batch, heads,
            queries, keys]` and is added to the scaled scores; the sink is that of `call`. The
            result is `[batch, heads, queries, size of value]`, of any strides.
        backward: `backward(grad, saved, call, needs) -> Gradients`, in the shapes of the forward's
            arguments, except that the gradient of the bias is `[batch, heads, queries, keys]`.
        parts: see `KernelParts`; the log-sum-exp is `[batch, heads, queries]`.
    """

    forward: Callable[..., tuple[torch.Tensor, Saved | None]]
    backward: Callable[[torch.Tensor, Saved, Call, Needs], Gradients]
    parts: KernelParts | None = None


class _Facts(NamedTuple):
    """What the adapter needs to turn gradients into the format of the call.

    Attributes:
        padded: for thd, batch and longest query sequence; None for other formats.
        bias: shape and dtype of the bias, if it needs a gradient.
    """

    padded: tuple[int, int] | None
    bias: tuple[torch.Size, torch.dtype] | None


def dense(kernel: Kernel) -> tuple[Forward, Backward]:
    """The two functions of a backend (see `backends/__init__.py`) from those of a kernel."""

    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, needs: Needs
    ) -> tuple[torch.Tensor, Saved | None]:
        qkv_format = call.shape.qkv_format
        if qkv_format == "thd":
            return _packed(kernel, (query, key, value), call, needs)
        if any(needs):  # autograd saves no views of inputs that were made without gradients
            query, key, value = query.detach(), key.detach(), value.detach()
        query = formats.heads_first(query, qkv_format)
        key = formats.heads_first(key, qkv_format)
        value = formats.heads_first(value, qkv_format)
        padding = _padding(query, key, call)
        out, saved = _masked(kernel, (query, key, value), padding, call, needs)
        if saved is not None:
            saved = saved.wrap((), _Facts(None, _bias_facts(call, needs)))
        return formats.flat_heads(out, qkv_format), saved

    def backward(grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
        shape = call.shape
        inner, rows, facts = saved.unwrap()
        grad = grad.view(*grad.shape[:-1], shape.heads, shape.value_size)
        if facts.padded is not None:
            grad = formats.gather_rows(grad, *rows[:2]).unflatten(0, facts.padded)
        qkv_format = "bshd" if shape.qkv_format == "thd" else shape.qkv_format
        grad = formats.heads_first(grad, qkv_format)
        gradients = kernel.backward(grad, inner, call, needs)
        found = [x if x is None else formats.heads_third(x, qkv_format) for x in gradients[:3]]
        if facts.padded is not None:
            maps = (rows[2:4], rows[4:], rows[4:])
            found = [
                x if x is None else formats.gather_rows(x.flatten(0, 1), *back)
                for x, back in zip(found, maps, strict=True)
            ]
        query, key, value = found
        bias = _bias_gradient(gradients.bias, facts, call)
        return Gradients(query, key, value, bias, gradients.sink)

    return forward, backward


def _packed(
    kernel: Kernel, inputs: Inputs, call: Call, needs: Needs
) -> tuple[torch.Tensor, Saved | None]:
    query, key, value = inputs
    rows, key_rows, padding = _rows_and_padding(query, key, call)
    query = formats.pad_sequences(query, rows)
    key, value = (formats.pad_sequences(x, key_rows) for x in (key, value))
    padded = (query.shape[0], query.shape[1])
    inputs = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    out, saved = _masked(kernel, inputs, padding, call, needs)
    if saved is not None:
        maps = (
            *(rows.token, rows.is_padding),
            *((rows.place, rows.is_outside) if needs.query else (None, None)),
            *((key_rows.place, key_rows.is_outside) if needs.key or needs.value else (None, None)),
        )
        saved = saved.wrap(maps, _Facts(padded, _bias_facts(call, needs)))
    return formats.pack_sequences(formats.flat_heads(out, "bshd"), rows), saved


def _rows_and_padding(
    query: torch.Tensor, key: torch.Tensor, call: Call
) -> tuple[formats.PackedRows, formats.PackedRows, Padding]:
    """For thd: how the sequences of queries and of keys are padded."""
    rows = _packed_rows(query, call.query_sequences, "cu_seqlens_q")
    key_rows, sequences = rows, call.key_sequences
    if not call.same_sequences:
        key_rows = _packed_rows(key, sequences, "cu_seqlens_kv")
    elif query.shape[0] != key.shape[0]:  # the same lengths, but unequal room after the last one
        sequences = sequences._replace(longest=rows.longest)
        key_rows = _packed_rows(key, sequences, "cu_seqlens_kv")._replace(lengths=rows.lengths)
    formats.check_equal_batch(rows.lengths.numel(), key_rows.lengths.numel())
    padding = padding_from_lengths(rows.lengths, key_rows.lengths, rows.longest, key_rows.longest)
    return rows, key_rows, padding


def score_inputs(
    query: torch.Tensor, key: torch.Tensor, call: Call
) -> tuple[torch.Tensor, torch.Tensor, Mask, torch.Tensor | None]:
    """What the scores of a call are made of: query, key, mask and bias of a `Kernel`."""
    qkv_format = call.shape.qkv_format
    if qkv_format == "thd":
        rows, key_rows, padding = _rows_and_padding(query, key, call)
        query = formats.pad_sequences(query, rows).transpose(1, 2)
        key = formats.pad_sequences(key, key_rows).transpose(1, 2)
        return query, key, *_mask_and_bias(query, key, padding, call)
    query, key = (formats.heads_first(x, qkv_format) for x in (query, key))
    return query, key, *_mask_and_bias(query, key, _padding(query, key, call), call)


def dense_parts(kernel: KernelParts) -> Parts:
    """The `Parts` of a backend from those of its kernel."""

    def log_sum_exp(saved: Saved, call: Call) -> torch.Tensor:
        inner, maps, facts = saved.unwrap()
        found = kernel.log_sum_exp(inner)
        if facts.padded is not None:
            return formats.gather_rows(found.transpose(1, 2).flatten(0, 1), *maps[2:4])
        return found.permute(2, 0, 1) if call.shape.qkv_format == "sbhd" else found.transpose(1, 2)

    def strip(saved: Saved, call: Call) -> Saved:
        inner, maps, facts = saved.unwrap()
        return kernel.strip(inner).wrap(maps, facts)

    def restore(
        stripped: Saved, tensors: tuple[torch.Tensor, ...], lse: torch.Tensor, call: Call
    ) -> Saved:
        inner, maps, facts = stripped.unwrap()
        query, key, value, out = tensors
        out = out.unflatten(-1, (call.shape.heads, call.shape.value_size))
        qkv_format = call.shape.qkv_format
        if facts.padded is None:
            found = [formats.heads_first(x, qkv_format) for x in (query, key, value, out)]
            lse = lse.permute(1, 2, 0) if qkv_format == "sbhd" else lse.transpose(1, 2)
        else:
            key_rows = _packed_rows(key, call.key_sequences, "cu_seqlens_kv")
            key, value = (formats.pad_sequences(x, key_rows) for x in (key, value))
            query, out, lse = (
                formats.gather_rows(x, *maps[:2]).unflatten(0, facts.padded)
                for x in (query, out, lse)
            )
            found = [x.transpose(1, 2) for x in (query, key, value, out)]
            lse = lse.transpose(1, 2)
        return kernel.restore(inner, tuple(found), lse).wrap(maps, facts)

    return Parts(log_sum_exp, strip, restore)


def _packed_rows(x: torch.Tensor, sequences: Sequences, parameter: str) -> formats.PackedRows:
    cu_seqlens, padded = sequences.checked(parameter)
    formats.check_ends(x.shape[0], cu_seqlens, padded, sequences.longest, parameter)
    return formats.packed_rows(x.shape[0], cu_seqlens, padded, sequences.longest)


def _padding(query: torch.Tensor, key: torch.Tensor, call: Call) -> Padding | None:
    """The padding of a call in sbhd or bshd, whose query and key have the shapes of a `Kernel`."""
    if not call.shape.rule.type.padding:
        return None
    return padding_of(call, query.shape[0], query.shape[2], key.shape[2])


def padding_of(call: Call, batch: int, queries: int, keys: int) -> Padding:
    """The padding of sbhd and bshd, from lengths if there are any, else from masks."""
    ends_q, ends_kv = call.query_sequences.cu_seqlens, call.key_sequences.cu_seqlens
    if ends_q is not None and ends_kv is not None:
        formats.check_cu_seqlens(ends_q, "cu_seqlens_q")
        formats.check_cu_seqlens(ends_kv, "cu_seqlens_kv")
        formats.check_batch(batch, ends_q, ends_kv)
        formats.check_lengths(queries, ends_q, "cu_seqlens_q")
        formats.check_lengths(keys, ends_kv, "cu_seqlens_kv")
        lengths = ends_q.diff()
        key_lengths = lengths if ends_kv is ends_q else ends_kv.diff()
        return padding_from_lengths(lengths, key_lengths, queries, keys)
    if call.attention_mask is None:
        alone = [
            name
            for name, ends in (("cu_seqlens_q", ends_q), ("cu_seqlens_kv", ends_kv))
            if ends is not None
        ]
        raise ValueError(
            "[attention] expected attention_mask, or both cu_seqlens_q and cu_seqlens_kv, for a"
            f" padding mask type, got {alone[0] + ' alone' if alone else 'none of them'}"
        )
    return padding_from_masks(call.attention_mask, batch, queries, keys)


def _masked(
    kernel: Kernel, inputs: Inputs, padding: Padding | None, call: Call, needs: Needs
) -> tuple[torch.Tensor, Saved | None]:
    """The kernel's forward, in `[batch, heads, sequence, size]`, with its mask and bias."""
    mask, bias = _mask_and_bias(inputs[0], inputs[1], padding, call)
    return kernel.forward(inputs, mask, bias, call, needs)


def _mask_and_bias(
    query: torch.Tensor, key: torch.Tensor, padding: Padding | None, call: Call
) -> tuple[Mask, torch.Tensor | None]:
    mask, bias = call.shape.band, None
    shape = (*query.shape[:3], key.shape[2])
    if mask is None:
        mask = _mask(call, shape, padding)
    if call.bias is not NO_BIAS:
        bias = _score_bias(call, shape, padding, query.device)
    return mask, bias


def _mask(call: Call, shape: tuple[int, int, int, int], padding: Padding | None) -> Mask:
    rule = call.shape.rule
    arbitrary = check_arbitrary(call.attention_mask, shape) if rule.type.arbitrary else None
    return build_mask(rule, shape[2], shape[3], padding, arbitrary)


def _score_bias(
    call: Call,
    shape: tuple[int, int, int, int],
    padding: Padding | None,
    device: torch.device,
) -> torch.Tensor:
    """What is added to the scaled scores; broadcasts to `shape`."""
    kind, bias, slopes = call.bias
    if bias is None:
        return _alibi(slopes, shape, padding, device)
    check_bias_shape(bias, shape)
    return bias * call.scale if kind == "pre_scale_bias" else bias


def _bias_facts(call: Call, needs: Needs) -> tuple[torch.Size, torch.dtype] | None:
    bias = call.bias.tensor
    return (bias.shape, bias.dtype) if bias is not None and needs.bias else None


def _bias_gradient(grad: torch.Tensor | None, facts: _Facts, call: Call) -> torch.Tensor | None:
    """The gradient of the bias, from the gradient of the scores with their bias."""
    if grad is None or facts.bias is None:
        return None
    shape, dtype = facts.bias
    grad = grad.sum_to_size(shape).to(dtype)
    return grad * call.scale if call.bias.type == "pre_scale_bias" else grad


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
    """Raise ValueError unless a bias has four dimensions and broadcasts to `shape`."""
    # cuDNN reads four dimensions; `bias_of` has added those that a user's bias lacks.
    check_broadcasts("a core_attention_bias", bias.shape, shape, fewest=4)
