"""The way to backends that take sequences of unequal length one after the other, without gaps.

    thd                   as it is; what lies outside the sequences is kept out of results
    thd with room between moved together, and apart again
    sbhd, bshd            real tokens are moved together, and apart again

Nothing here waits for the device: there are as many rows as there may be tokens, and what is left
over at the end belongs to no sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch._torch_private import once_differentiable
from transformer_engine.pytorch.attention.backends.dense import Attend, padding_of
from transformer_engine.pytorch.attention.core import formats
from transformer_engine.pytorch.attention.core.call import Call, Sequences
from transformer_engine.pytorch.attention.core.formats import Maps


class Side(NamedTuple):
    """The sequences of queries, or of keys and values, as a kernel takes them.

    Attributes:
        cu_seqlens: int32 `[batch + 1]`, where each sequence ends.
        longest: tokens of the longest sequence, or more.
        maps: how tokens are moved together; None where they are already.
        outside: bool `[tokens]`, True for tokens of no sequence.
    """

    cu_seqlens: torch.Tensor
    longest: int
    maps: Maps | None
    outside: torch.Tensor


def varlen(kernel: Callable[..., torch.Tensor]) -> Attend:
    """A backend's `attend` (see `backends/__init__.py`) from a kernel, for padding mask types.

    Args:
        kernel: `kernel(query, key, value, of_query, of_key, call)`. query is `[tokens, heads,
            size]`, key and value are `[tokens, groups, size]`; `of_query` and `of_key` are a
            `Side`. The result is `[tokens, heads, size of value]`; rows of no sequence, and their
            gradients, may be anything.
    """

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
    ) -> torch.Tensor:
        of_query, of_key = _sides(query, key, call)
        qkv_format = call.shape.qkv_format
        packed = [
            _together(x, side, qkv_format)
            for x, side in ((query, of_query), (key, of_key), (value, of_key))
        ]
        out = kernel(*packed, of_query, of_key, call)
        out = out.masked_fill(of_query.outside[:, None, None], 0)
        if of_query.maps is not None:
            out = formats.move_rows(out, of_query.maps.reversed())
        if qkv_format == "thd":
            return out.flatten(1)
        out = out.unflatten(0, (-1, call.shape.queries))
        return (out.transpose(0, 1) if qkv_format == "sbhd" else out).flatten(2)

    return attend


def _together(x: torch.Tensor, side: Side, qkv_format: str) -> torch.Tensor:
    if qkv_format == "sbhd":
        x = x.transpose(0, 1)
    if qkv_format != "thd":
        x = x.flatten(0, 1)
    if side.maps is not None:
        return formats.move_rows(x, side.maps)
    fenced: torch.Tensor = _Fence.apply(x, side.outside)
    return fenced


class _Fence(torch.autograd.Function):
    """The tensor itself; its gradient is zero for tokens of no sequence."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, outside: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(outside)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (outside,) = ctx.saved_tensors
        return grad.masked_fill(outside[:, None, None], 0), None


def _sides(query: torch.Tensor, key: torch.Tensor, call: Call) -> tuple[Side, Side]:
    if call.shape.qkv_format == "thd":
        of_query = _thd_side(query.shape[0], call.of_query, "cu_seqlens_q")
        if call.same_sequences and query.shape[0] == key.shape[0]:
            return of_query, of_query
        of_key = _thd_side(key.shape[0], call.of_key, "cu_seqlens_kv")
        formats.check_equal_batch(of_query.cu_seqlens.numel() - 1, of_key.cu_seqlens.numel() - 1)
        return of_query, of_key
    batch, queries, keys = call.shape.batch, call.shape.queries, call.shape.keys
    assert batch is not None
    padding = padding_of(call, batch, queries, keys)
    of_query = _padded_side(padding.queries.view(batch, queries))
    if padding.keys is padding.queries:
        return of_query, of_query
    return of_query, _padded_side(padding.keys.view(batch, keys))


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
    """Real tokens first, in their order; wherever in a sequence the padding is."""
    batch, longest = is_padding.shape
    flat = is_padding.flatten()
    ends = (~is_padding).sum(1).cumsum(0)
    cu_seqlens = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
    place = flat.to(torch.uint8).argsort(stable=True)
    outside = torch.arange(batch * longest, device=flat.device) >= ends[-1]
    token = ((~flat).cumsum(0) - 1).clamp_(min=0)
    return Side(cu_seqlens, longest, Maps(place, outside, token, flat), outside)
