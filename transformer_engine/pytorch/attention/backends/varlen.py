"""Adapter to kernels that take sequences of unequal length, packed without gaps.

    thd                 as it is; results and gradients of tokens of no sequence are set to zero
    thd with padding    tokens are packed without gaps for the kernel, and unpacked afterwards
    sbhd, bshd          real tokens are packed for the kernel, and unpacked afterwards

Packed tensors have as many rows as there are tokens with padding, so that the host need not know
how many are real; the rows left over at the end belong to no sequence. The host waits for the
device only to learn the longest sequence of thd, if `max_seqlen` does not tell it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from transformer_engine.pytorch.attention.backends.backend import (
    Backward,
    Forward,
    Gradients,
    KernelParts,
    Needs,
    Parts,
    Saved,
)
from transformer_engine.pytorch.attention.backends.dense import padding_of
from transformer_engine.pytorch.attention.core import formats
from transformer_engine.pytorch.attention.core.call import Call, Sequences
from transformer_engine.pytorch.attention.core.formats import Maps


class Side(NamedTuple):
    """The sequences of queries, or of keys and values, as a kernel takes them.

    Attributes:
        cu_seqlens: int32 `[batch + 1]`, ends of the packed sequences, after a zero.
        longest: tokens of the longest sequence, or more.
        maps: how tokens are packed; None if they already are.
        outside: bool `[tokens]`, True for tokens of no sequence.
    """

    cu_seqlens: torch.Tensor
    longest: int
    maps: Maps | None
    outside: torch.Tensor

    @property
    def back(self) -> tuple[torch.Tensor, ...]:
        """The tensors that `_apart` reads."""
        return (self.outside,) if self.maps is None else self.maps[2:]


class VarlenKernel(NamedTuple):
    """Attention of packed sequences, as a pair of functions.

    Attributes:
        forward: `forward((query, key, value), query_side, key_side, call, needs) -> out, Saved or
            None`. query is `[tokens, heads, size]`, key and value are `[tokens, groups, size]`; the
            sides are a `Side` each. The result is `[tokens, heads, size of value]`; rows of no
            sequence may hold anything.
        backward: `backward(grad, saved, call, needs) -> Gradients`, in these shapes; rows of no
            sequence may hold anything.
    """

    forward: Callable[..., tuple[torch.Tensor, Saved | None]]
    backward: Callable[[torch.Tensor, Saved, Call, Needs], Gradients]


def varlen(kernel: VarlenKernel) -> tuple[Forward, Backward]:
    """The two functions of a backend (see `backends/__init__.py`), for padding mask types."""

    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, needs: Needs
    ) -> tuple[torch.Tensor, Saved | None]:
        query_side, key_side = _sides(query, key, call)
        sides = (query_side, key_side, key_side)
        packed = [
            _together(x, side, call.shape.qkv_format)
            for x, side in zip((query, key, value), sides, strict=True)
        ]
        out, saved = kernel.forward(packed, query_side, key_side, call, needs)
        out = out.masked_fill(query_side.outside[:, None, None], 0)
        if query_side.maps is not None:
            out = formats.move_rows(out, query_side.maps.reversed())
        if saved is not None:
            there = () if query_side.maps is None else query_side.maps[:2]
            query_back = query_side.back if needs.query else ()
            key_back = key_side.back if needs.key or needs.value else ()
            tensors = (query_side.outside, *there, *query_back, *key_back)
            saved = saved.wrap(tensors, (len(there), len(query_back)))
        return _in_format(out, call, call.shape.queries).flatten(-2), saved

    def backward(grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
        shape = call.shape
        inner, (outside, *rows), (there, back) = saved.unwrap()
        grad = grad.view(*grad.shape[:-1], shape.heads, shape.value_size)
        grad = _one_after_the_other(grad, shape.qkv_format)
        if there:
            grad = formats.gather_rows(grad, *rows[:there])
        grad = grad.masked_fill(outside[:, None, None], 0)
        gradients = kernel.backward(grad, inner, call, needs)
        query_rows, key_rows = rows[there : there + back], rows[there + back :]
        sides = ((query_rows, shape.queries), (key_rows, shape.keys), (key_rows, shape.keys))
        found = [
            x if x is None else _in_format(_apart(x, side), call, length)
            for x, (side, length) in zip(gradients[:3], sides, strict=True)
        ]
        query, key, value = found
        return Gradients(query, key, value, sink=gradients.sink)

    return forward, backward


def varlen_parts(kernel: KernelParts) -> Parts:
    """The `Parts` of a backend for padding mask types.

    Args:
        kernel: functions for packed sequences, whose log-sum-exp is `[tokens, heads]`.
    """

    def log_sum_exp(saved: Saved, call: Call) -> torch.Tensor:
        inner, (_, *maps), (there, back) = saved.unwrap()
        found = _apart(kernel.log_sum_exp(inner), maps[there : there + back])
        return _in_format(found, call, call.shape.queries)

    def strip(saved: Saved, call: Call) -> Saved:
        inner, tensors, facts = saved.unwrap()
        return kernel.strip(inner).wrap(tensors, facts)

    def restore(
        stripped: Saved, tensors: tuple[torch.Tensor, ...], lse: torch.Tensor, call: Call
    ) -> Saved:
        inner, maps, facts = stripped.unwrap()
        query, key, value, out = tensors
        out = out.unflatten(-1, (call.shape.heads, call.shape.value_size))
        query_side, key_side = _sides(query, key, call)
        sides = (query_side, key_side, key_side, query_side, query_side)
        *packed, lse = [
            _together(x, side, call.shape.qkv_format)
            for x, side in zip((query, key, value, out, lse), sides, strict=True)
        ]
        return kernel.restore(inner, tuple(packed), lse).wrap(maps, facts)

    return Parts(log_sum_exp, strip, restore)


def _one_after_the_other(x: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """`[tokens, heads, size]` of any format, padding included."""
    if qkv_format == "thd":
        return x
    return (x.transpose(0, 1) if qkv_format == "sbhd" else x).flatten(0, 1)


def _in_format(x: torch.Tensor, call: Call, length: int) -> torch.Tensor:
    """`[tokens, heads, size]`, padding included, in the format of the call."""
    shape = call.shape
    if shape.qkv_format == "thd":
        return x
    x = x.unflatten(0, (-1, length))
    return x.transpose(0, 1) if shape.qkv_format == "sbhd" else x


def _together(x: torch.Tensor, side: Side, qkv_format: str) -> torch.Tensor:
    x = _one_after_the_other(x, qkv_format)
    if side.maps is not None:
        return formats.move_rows(x, side.maps)
    if torch.is_grad_enabled() and x.requires_grad:  # torch must find zero gradients outside
        return torch.where(side.outside[:, None, None], x.detach(), x)
    return x


def _apart(grad: torch.Tensor, back: Sequence[torch.Tensor]) -> torch.Tensor:
    """The gradient of the tensor that `_together` packed; zero for tokens of no sequence."""
    if len(back) > 1:
        return formats.gather_rows(grad, *back)
    return grad.masked_fill(back[0].view(-1, *(1,) * (grad.dim() - 1)), 0)


def _sides(query: torch.Tensor, key: torch.Tensor, call: Call) -> tuple[Side, Side]:
    if call.shape.qkv_format == "thd":
        query_side = _thd_side(query.shape[0], call.query_sequences, "cu_seqlens_q")
        if call.same_sequences and query.shape[0] == key.shape[0]:
            return query_side, query_side
        key_side = _thd_side(key.shape[0], call.key_sequences, "cu_seqlens_kv")
        batches = [side.cu_seqlens.numel() - 1 for side in (query_side, key_side)]
        formats.check_equal_batch(*batches)
        return query_side, key_side
    batch, queries, keys = call.shape.batch, call.shape.queries, call.shape.keys
    assert batch is not None
    padding = padding_of(call, batch, queries, keys)
    query_side = _padded_side(padding.queries.view(batch, queries))
    if padding.keys is padding.queries:
        return query_side, query_side
    return query_side, _padded_side(padding.keys.view(batch, keys))


def _thd_side(tokens: int, sequences: Sequences, parameter: str) -> Side:
    cu_seqlens, starts = sequences.checked(parameter)
    longest = sequences.longest
    if longest is None:
        longest = int(cu_seqlens.diff().max()) if cu_seqlens.numel() > 1 else 0
    index = torch.arange(tokens, device=cu_seqlens.device)
    outside = index >= cu_seqlens[-1]
    maps = None
    if starts is not None:
        maps = formats.gap_maps(tokens, cu_seqlens, starts)
    return Side(cu_seqlens, longest, maps, outside)


def _padded_side(is_padding: torch.Tensor) -> Side:
    """Packs the real tokens, in their order. The padding may be anywhere in a sequence."""
    batch, longest = is_padding.shape
    flat = is_padding.flatten()
    ends = (~is_padding).sum(1).cumsum(0)
    cu_seqlens = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
    place = flat.to(torch.uint8).argsort(stable=True)
    outside = torch.arange(batch * longest, device=flat.device) >= ends[-1]
    token = ((~flat).cumsum(0) - 1).clamp_(min=0)
    return Side(cu_seqlens, longest, Maps(place, outside, token, flat), outside)
