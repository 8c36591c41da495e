"""Memory formats of attention tensors, and their conversion to `[batch, heads, sequence, size]`.

    sbhd  [sequence, batch, heads, size]      a view
    bshd  [batch, sequence, heads, size]      a view
    thd   [tokens, heads, size]               sequences of unequal length, one after the other

Sequence b of thd is the tokens `cu_seqlens[b]` to `cu_seqlens[b + 1] - 1`. If there is room for
padding between sequences, `cu_seqlens_padded[b]` is where sequence b starts, and
`cu_seqlens[b + 1] - cu_seqlens[b]` is its length. `PackedRows` has the index maps between thd and
sequences padded to `[batch, longest]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch._torch_private import once_differentiable
from transformer_engine.pytorch.module import inputs
from transformer_engine.pytorch.module.inputs import (
    LEADING,
    can_read,
    check_rise,
    known_lengths,
    shortened,
)

FORMATS = ("sbhd", "bshd", "thd")


def check_format(qkv_format: str) -> str:
    """Return the format; for an unknown one, raise a ValueError that lists the formats."""
    if qkv_format not in FORMATS:
        raise ValueError(
            f"[attention] expected qkv_format in {{{', '.join(FORMATS)}}}, got {qkv_format!r}"
        )
    return qkv_format


def check_mask_of_format(qkv_format: str, padding: bool, mask_type: str) -> None:
    """Raise ValueError for `thd` with a mask type that knows no lengths of sequences."""
    if qkv_format == "thd" and not padding:
        raise ValueError(
            "[attention] expected a padding mask type (padding, padding_causal, ...) for"
            f" qkv_format 'thd', whose sequences have unequal lengths, got {mask_type!r}"
        )


_BATCH_DIM = {"sbhd": 1, "bshd": 0}


def sequence_dim(qkv_format: str) -> int:
    """The dimension of tokens."""
    return 1 if qkv_format == "bshd" else 0


Shapes = tuple[torch.Size, torch.Size, torch.Size]


def shapes_of_heads(
    tokens: Sequence[Sequence[int]], heads: tuple[int, int], sizes: tuple[int, int]
) -> Shapes:
    """The shapes of query, key and value.

    Args:
        tokens: the sizes of query, key and value in front of the heads.
        heads: number of query heads, and of key and value heads.
        sizes: size of a head of queries and keys, and of values.
    """
    queries, keys, values = tokens
    return (
        torch.Size((*queries, heads[0], sizes[0])),
        torch.Size((*keys, heads[1], sizes[0])),
        torch.Size((*values, heads[1], sizes[1])),
    )


def check_shapes(
    qkv_format: str, heads: tuple[int, int], sizes: tuple[int, int], shapes: Shapes
) -> None:
    """Check shapes of (query, key, value); `heads` and `sizes` are as in `shapes_of_heads`."""
    query, key, value = shapes
    leading = 1 if qkv_format == "thd" else 2
    agree = (
        query[leading:] == (heads[0], sizes[0])
        and key[leading:] == (heads[1], sizes[0])
        and value[leading:] == (heads[1], sizes[1])
    )
    if not agree:
        names = LEADING[qkv_format]
        raise ValueError(
            f"[DotProductAttention] expected query_layer ({names}, {heads[0]}, {sizes[0]}),"
            f" key_layer ({names}, {heads[1]}, {sizes[0]}) and value_layer"
            f" ({names}, {heads[1]}, {sizes[1]}) for qkv_format {qkv_format!r},"
            f" got {tuple(query)}, {tuple(key)}, {tuple(value)}"
        )
    batch = _BATCH_DIM.get(qkv_format)
    if batch is not None:
        _check_equal("batch size", query_layer=query[batch], key_layer=key[batch])
        _check_equal("batch size", key_layer=key[batch], value_layer=value[batch])
    tokens = sequence_dim(qkv_format)
    _check_equal("length", key_layer=key[tokens], value_layer=value[tokens])


def _check_equal(what: str, **sizes: int) -> None:
    (one, size), (other, other_size) = sizes.items()
    if size != other_size:
        raise ValueError(
            f"[DotProductAttention] expected {one} and {other} of one {what}, got {size} and"
            f" {other_size}"
        )


def heads_first(x: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """View of `sbhd` or `bshd` as `[batch, heads, sequence, size]`."""
    return x.permute(1, 2, 0, 3) if qkv_format == "sbhd" else x.transpose(1, 2)


def heads_third(x: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """View of `[batch, heads, sequence, size]` in the format sbhd or bshd."""
    return x.permute(2, 0, 1, 3) if qkv_format == "sbhd" else x.transpose(1, 2)


def flat_heads(x: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """`[batch, heads, sequence, size]` as `[..., heads * size]` in the format sbhd or bshd."""
    return heads_third(x, qkv_format).flatten(2)


class PackedRows(NamedTuple):
    """How the tokens of thd map to padded sequences `[batch, longest]`, and back.

    Attributes:
        lengths: int64 `[batch]`, lengths without padding.
        longest: length of the padded sequences.
        token: int64 `[batch * longest]`, the index in thd of each padded row (0 for padding).
        is_padding: bool `[batch * longest]`.
        place: int64 `[tokens]`, the padded row of each token of thd (0 for tokens outside).
        is_outside: bool `[tokens]`, True for tokens between or after the sequences.
    """

    lengths: torch.Tensor
    longest: int
    token: torch.Tensor
    is_padding: torch.Tensor
    place: torch.Tensor
    is_outside: torch.Tensor


class Maps(NamedTuple):
    """How rows move: row i of the result is row `rows[i]`, or zero if `absent[i]`.

    Attributes:
        rows: int64.
        absent: bool.
        back_rows: `rows` of the inverse, which gradients need.
        back_absent: `absent` of the inverse.
    """

    rows: torch.Tensor
    absent: torch.Tensor
    back_rows: torch.Tensor
    back_absent: torch.Tensor

    def reversed(self) -> Maps:
        """The maps of the inverse."""
        return Maps(*self[2:], *self[:2])


def packed_rows(
    tokens: int,
    cu_seqlens: torch.Tensor,
    cu_seqlens_padded: torch.Tensor | None,
    longest: int | None,
) -> PackedRows:
    """Index maps between thd and padded sequences.

    If `longest` is None, the host reads it from the device.
    """
    ends = cu_seqlens.to(torch.int64)
    lengths = ends.diff()
    starts = ends[:-1] if cu_seqlens_padded is None else cu_seqlens_padded[:-1].to(torch.int64)
    if longest is None:
        longest = int(lengths.max()) if lengths.numel() else 0
    step = torch.arange(longest, device=ends.device)
    is_padding = step >= lengths[:, None]
    token = (starts[:, None] + step).masked_fill(is_padding, 0)
    index = torch.arange(tokens, device=ends.device)
    sequence, step_of_token, is_outside = _places(index, starts, lengths)
    place = (sequence * longest + step_of_token).masked_fill(is_outside, 0)
    return PackedRows(lengths, longest, token.flatten(), is_padding.flatten(), place, is_outside)


def _places(
    index: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each token of `index`: its sequence, its position there, and whether it has none."""
    if lengths.shape[0] == 0:  # nothing can be looked up
        nowhere = torch.zeros_like(index)
        return nowhere, nowhere, torch.ones_like(index, dtype=torch.bool)
    sequence = (torch.searchsorted(starts, index, right=True) - 1).clamp_(min=0)
    step = index - starts[sequence]
    return sequence, step, (step < 0) | (step >= lengths[sequence])


class _GatherRows(torch.autograd.Function):
    """Rows `x[index]`, zero where `absent`; the backward does the same with the inverse maps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, maps: Maps) -> torch.Tensor:
        index, absent, *back = maps
        ctx.save_for_backward(*back)
        return gather_rows(x, index, absent)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather_rows(grad, *ctx.saved_tensors), None


def gather_rows(x: torch.Tensor, index: torch.Tensor, absent: torch.Tensor) -> torch.Tensor:
    """Rows `x[index]`, zero where `absent`."""
    if x.shape[0] == 0:
        return x.new_zeros(index.shape[0], *x.shape[1:])
    # Not in place: Dynamo of torch 2.11 loses the gradient of an autograd function whose result is
    # also the result of another operation in it.
    return x.index_select(0, index).masked_fill(absent.view(-1, *(1,) * (x.dim() - 1)), 0)


def move_rows(x: torch.Tensor, maps: Maps) -> torch.Tensor:
    """The rows of x, moved as the maps say; autograd moves gradients with the inverse maps."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return gather_rows(x, maps.rows, maps.absent)
    return _GatherRows.apply(x, maps)


def pad_sequences(x: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """`[tokens, ...]` as `[batch, longest, ...]`, zero in the padding."""
    padded = move_rows(x, Maps(rows.token, rows.is_padding, rows.place, rows.is_outside))
    return padded.view(rows.lengths.shape[0], rows.longest, *x.shape[1:])


def pack_sequences(x: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """`[batch, longest, ...]` as `[tokens, ...]`, zero for tokens outside the sequences."""
    maps = Maps(rows.place, rows.is_outside, rows.token, rows.is_padding)
    return move_rows(x.flatten(0, 1), maps)


def gap_maps(tokens: int, cu_seqlens: torch.Tensor, starts: torch.Tensor) -> Maps:
    """Maps that pack sequences, which begin at `starts`, without gaps, as `cu_seqlens` says."""
    together, apart = cu_seqlens.to(torch.int64), starts.to(torch.int64)[: cu_seqlens.shape[0]]
    index = torch.arange(tokens, device=cu_seqlens.device)
    return Maps(*_moved(index, together, apart), *_moved(index, apart, together, together.diff()))


def _moved(
    index: torch.Tensor,
    of: torch.Tensor,
    to: torch.Tensor,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the tokens `index` are, if their sequences begin at `to` instead of `of`.

    Also returns whether a token is outside of all sequences.
    """
    lengths = of.diff() if lengths is None else lengths
    sequence, step, absent = _places(index, of[:-1], lengths)
    return (to[sequence] + step).masked_fill(absent, 0), absent


def check_cu_seqlens(cu_seqlens: torch.Tensor | None, parameter: str) -> torch.Tensor:
    """Check that `cu_seqlens` is an int32 vector."""
    if cu_seqlens is None:
        raise ValueError(f"[attention] expected {parameter} for qkv_format 'thd', got None")
    inputs.check_cu_seqlens("attention", parameter, cu_seqlens, torch.int32)
    return cu_seqlens


def check_starts(starts: torch.Tensor, cu_seqlens: torch.Tensor, parameter: str) -> None:
    """Check `cu_seqlens_padded`: dtype and number of elements are those of `cu_seqlens`."""
    check_cu_seqlens(starts, f"{parameter}_padded")
    if starts.shape != cu_seqlens.shape:
        raise ValueError(
            f"[attention] expected {parameter}_padded of shape {tuple(cu_seqlens.shape)}, as"
            f" {parameter}, got {tuple(starts.shape)}"
        )


def name_of_longest(parameter: str) -> str:
    """`max_seqlen_q` for `cu_seqlens_q`, `max_seqlen_kv` for `cu_seqlens_kv`."""
    return parameter.replace("cu_seqlens", "max_seqlen")


def check_ends(
    tokens: int,
    cu_seqlens: torch.Tensor,
    cu_seqlens_padded: torch.Tensor | None,
    longest: int | None,
    parameter: str,
) -> None:
    """Check that sequences begin at 0, do not overlap, end within the tokens, and are not too long.

    Only CPU tensors are checked: for others the host would wait for the device.
    """
    check_rise("attention", parameter, cu_seqlens, tokens)
    lengths = known_lengths(cu_seqlens)
    if longest is not None and max(lengths, default=0) > longest:
        raise ValueError(
            f"[attention] expected {name_of_longest(parameter)} of at least {max(lengths)}, the"
            f" longest sequence of {parameter}, got {longest}"
        )
    if cu_seqlens_padded is not None and can_read(cu_seqlens_padded):
        starts = cu_seqlens_padded.tolist()
        limits = [*starts[1 : len(lengths)], tokens]
        rows = zip(starts, lengths, limits, strict=False)
        if starts[0] < 0 or any(start + length > limit for start, length, limit in rows):
            raise ValueError(
                f"[attention] expected {parameter}_padded to leave room for the lengths"
                f" {shortened(lengths)} of {parameter} within {tokens} tokens, got"
                f" {shortened(starts)}"
            )


def check_lengths(sequence: int, cu_seqlens: torch.Tensor, parameter: str) -> None:
    """Check that `cu_seqlens` begins at 0 and lengths fit in; only CPU tensors are checked."""
    check_rise("attention", parameter, cu_seqlens)
    lengths = known_lengths(cu_seqlens)
    if max(lengths, default=0) > sequence:
        raise ValueError(
            f"[attention] expected {parameter} of sequences of at most {sequence} tokens, got the"
            f" lengths {shortened(lengths)}"
        )


def check_batch(batch: int, cu_seqlens_q: torch.Tensor, cu_seqlens_kv: torch.Tensor) -> None:
    """Check that both have an entry for each sequence of the batch."""
    expected = (batch + 1,)
    if cu_seqlens_q.shape != expected or cu_seqlens_kv.shape != expected:
        raise ValueError(
            f"[attention] expected cu_seqlens_q and cu_seqlens_kv of shape {expected}, got"
            f" {tuple(cu_seqlens_q.shape)} and {tuple(cu_seqlens_kv.shape)}"
        )


def check_equal_batch(queries: int, keys: int) -> None:
    """Check that queries and keys have the same number of sequences."""
    if queries != keys:
        raise ValueError(
            "[attention] expected cu_seqlens_q and cu_seqlens_kv of equal shape, got batches of"
            f" {queries} and {keys}"
        )
