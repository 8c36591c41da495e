"""Calls of parts: attention of some queries and some keys, merging, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.attention.backends.backend import Backend, Gradients, Needs, Saved
from transformer_engine.pytorch.attention.backends.choice import choose
from transformer_engine.pytorch.attention.context.lengths import UNIT, Lengths, lengths_of
from transformer_engine.pytorch.attention.context.spans import Piece, Range, Side, pieces
from transformer_engine.pytorch.attention.core.call import (
    NO_BIAS,
    NO_SINK,
    Bias,
    Call,
    CallShape,
    Sequences,
)
from transformer_engine.pytorch.attention.core.formats import sequence_dim
from transformer_engine.pytorch.attention.masks.masks import MaskRule, MaskType, build_mask
from transformer_engine.pytorch.capture import memoize

_ALL = Needs(True, True, True)
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Part(NamedTuple):
    """A part.

    Attributes:
        piece: the tokens of both sides.
        call: of attention.
        seen: bool, broadcastable to rows `[..., heads]`, False of padding; None where all are.
        columns: keys of the part in whole sequences, first and count of each stretch.
    """

    piece: Piece
    call: Call
    seen: torch.Tensor | None
    columns: list[Range]


class Kept(NamedTuple):
    """What the forward of a part leaves: a `Saved` without what comes again, and its backend."""

    backend: Backend
    saved: Saved


class Whole:
    """A call on one rank, which parts are cut from.

    Args:
        call: with its tensors.
        ranks: of the ring, or of the group that gathers.
        queries: what this rank has.
        key_share: keys in memory are one of so many parts of each sequence.
        tokens: of queries and of keys in memory.
    """

    def __init__(
        self, call: Call, ranks: int, queries: Side, key_share: int, tokens: tuple[int, int]
    ) -> None:
        self.call = call
        self.ranks = ranks
        self.queries = queries
        self.key_share = key_share
        self.tokens = tokens
        self.rule = call.shape.rule
        self.packed = call.shape.qkv_format == "thd"
        self.dim = sequence_dim(call.shape.qkv_format)

    @cached_property
    def query_lengths(self) -> Lengths | None:
        """Of queries, where there is padding."""
        if not self.rule.type.padding:
            return None
        return self._lengths(self.call.query_sequences, "cu_seqlens_q", self.ranks, 0)

    @cached_property
    def key_lengths(self) -> Lengths | None:
        """Of keys, likewise."""
        if not self.rule.type.padding:
            return None
        sequences = self.call.key_sequences
        return self._lengths(sequences, "cu_seqlens_kv", self.key_share, 1)

    def _lengths(self, sequences: Sequences, name: str, share: int, side: int) -> Lengths:
        qkv_format = self.call.shape.qkv_format
        return lengths_of(sequences, name, qkv_format, self.ranks, share, self.tokens[side])

    @cached_property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`Lengths.places` of queries."""
        assert self.query_lengths is not None
        return self.query_lengths.places()

    def parts(self, keys: Side) -> Iterator[Part]:
        """Of the queries with these keys."""
        left, right, shift = self.rule.left, self.rule.right, 0
        if self.packed:
            left = -1  # chunks have a length in each sequence; `_shape` adds it again
        elif self.rule.bottom_right:
            whole = [side.length * 2 * self.ranks for side in (keys, self.queries)]
            shift = whole[0] - whole[1]
        for piece in pieces(left, right, shift, self.queries, keys):
            yield self._part(piece, keys)

    def _part(self, piece: Piece, keys: Side) -> Part:
        call, columns = self.call, keys.stretches(piece.keys)
        tokens = self.tokens if self.packed else None
        shape = _shape(call.shape, piece, tokens)
        queries, key_sequences, seen = self._sequences(piece, keys)
        mask: Any = call.attention_mask if self.rule.type.arbitrary else None
        bias = call.bias
        if isinstance(mask, torch.Tensor):
            mask = block(mask, piece.queries, columns)
        if bias.tensor is not None:
            bias = Bias(bias.type, block(bias.tensor, piece.queries, columns))
        own = call._replace(
            shape=shape,
            attention_mask=mask,
            query_sequences=queries,
            key_sequences=key_sequences,
            bias=bias if bias.tensor is not None else NO_BIAS,
            sink=NO_SINK,
            checkpoint=False,
            context=None,
            part=True,
        )
        return Part(piece, own, seen, columns)

    def _sequences(
        self, piece: Piece, keys: Side
    ) -> tuple[Sequences, Sequences, torch.Tensor | None]:
        """Of queries and keys of a part, and which of its queries see any key."""
        lengths, key_lengths = self.query_lengths, self.key_lengths
        if lengths is None or key_lengths is None:
            return Sequences(), Sequences(), None
        queries = lengths.sequences(self.queries, piece.queries)
        alike = self.call.same_sequences and keys == self.queries and piece.keys == piece.queries
        key_sequences = queries if alike else key_lengths.sequences(keys, piece.keys)
        real = lengths.of(self.queries, piece.queries)
        real = torch.where(key_lengths.of(keys, piece.keys) > 0, real, 0)
        if self.packed:
            assert lengths.units is not None
            sequence, place = self.places
            begin = lengths.units[sequence] * (piece.queries[0] // UNIT)
            seen = (place >= begin) & (place < begin + real[sequence])
            return queries, key_sequences, seen[:, None]
        count = piece.queries[1] - piece.queries[0]
        seen = torch.arange(count, device=real.device) < real[:, None]
        seen = seen.t() if self.call.shape.qkv_format == "sbhd" else seen
        return queries, key_sequences, seen.unsqueeze(-1)

    def narrow(self, x: torch.Tensor, range: Range) -> torch.Tensor:
        """These tokens of x; all of thd, where lengths say which."""
        if self.packed:
            return x
        return x.narrow(self.dim, range[0], range[1] - range[0])


def block(x: torch.Tensor, queries: Range, columns: list[Range]) -> torch.Tensor:
    """Rows and columns of `[..., queries of this rank, keys of all]`; sizes of 1 stay."""
    if x.dim() > 1 and x.shape[-2] > 1:
        x = x.narrow(-2, queries[0], queries[1] - queries[0])
    if x.shape[-1] > 1:
        parts = [x.narrow(-1, first, count) for first, count in columns]
        x = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return x


@memoize
def _shape(shape: CallShape, piece: Piece, tokens: tuple[int, int] | None) -> CallShape:
    """Of the call of a part; `tokens` in memory of thd."""
    queries, keys = (end - begin for begin, end in (piece.queries, piece.keys))
    kind, left = shape.rule.type, piece.left
    if tokens is not None:
        left = shape.rule.left
    causal = piece.right == 0
    bottom_right = queries != keys
    rule = MaskRule(
        MaskType(kind.padding, causal, causal and bottom_right, kind.arbitrary),
        left,
        piece.right,
        bottom_right or not causal,
    )
    if tokens is not None:
        queries, keys = tokens
    plain = not (kind.padding or kind.arbitrary)
    band = build_mask(rule, queries, keys) if plain else None
    sizes = (shape.heads, shape.groups, shape.key_size, shape.value_size)
    return CallShape(shape.qkv_format, rule, band, *sizes, shape.batch, queries, keys)


def run_part(inputs: Inputs, part: Part, needs: Needs) -> tuple[torch.Tensor, torch.Tensor, Kept]:
    """Result and rows `[..., heads]` of a part, and what its backward needs."""
    call = part.call
    bias = call.bias.tensor
    if bias is not None and needs.bias:  # the choice depends on it
        bias = bias.detach().requires_grad_()
    with torch.set_grad_enabled(needs.bias):
        asked = call if bias is None else call._replace(bias=Bias(call.bias.type, bias))
        backend = choose(inputs[0].device, inputs[0].dtype, any(needs), asked)
    parts = backend.parts
    assert parts is not None, "the table of requirements refuses others"
    call = with_seed(call, backend, inputs[0].device)
    with torch.no_grad():
        out, saved = backend.forward(*inputs, call, _ALL._replace(bias=needs.bias))
        assert saved is not None
        rows = parts.rows(saved, call)
        rest = parts.keep(saved, call)
    rows = rows.masked_fill(rows == torch.inf, -torch.inf)
    if part.seen is not None:
        rows = rows.masked_fill(~part.seen, -torch.inf)
    return out, rows, Kept(backend, rest)


def with_seed(call: Call, backend: Backend, device: torch.device) -> Call:
    """The call with a seed of dropout, where the backend takes one."""
    draw = backend.draw_seed
    if draw is None or call.dropout.p == 0.0:
        return call
    return call._replace(dropout=call.dropout._replace(seed=draw(device)))


def back_part(
    grad: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    rows: torch.Tensor,
    part: Part,
    rest: Kept,
    needs: Needs,
) -> Gradients:
    """Gradients of a part.

    Args:
        grad: of the result, of the queries of the part.
        tensors: query, key, value and result.
        rows: log-sum-exp of all keys, +inf of queries that see none.
        part: as in the forward.
        rest: by the forward.
        needs: of the backward.
    """
    backend, saved = rest
    assert backend.parts is not None
    saved = backend.parts.restore(saved, tensors, rows, part.call)
    found: Gradients = backend.backward(grad, saved, part.call.settings(), needs)
    return found


class Merged:
    """Results of parts as they come, in fp32, each by its share of the softmax.

    Args:
        whole: the call.
        query: `[..., heads, size]`.
    """

    def __init__(self, whole: Whole, query: torch.Tensor) -> None:
        self.whole = whole
        self.size = whole.call.shape.value_size
        self.rows: torch.Tensor | None = None
        self._like = query
        self.out: torch.Tensor | None = None

    def add(self, part: Part, out: torch.Tensor, rows: torch.Tensor) -> None:
        """Take the result of a part in."""
        out = out.unflatten(-1, (-1, self.size))
        if self.out is None or self.rows is None:
            if self._covers(part):
                self.out, self.rows = out.float(), rows.contiguous()
                return
            self._begin()
        assert self.out is not None and self.rows is not None
        self.out = self.out.contiguous()
        mine = self.whole.narrow(self.out, part.piece.queries)
        mine_rows = self.whole.narrow(self.rows, part.piece.queries)
        share = torch.sigmoid(rows - mine_rows).masked_fill_(rows == -torch.inf, 0.0)
        mine.lerp_(out.float(), share.unsqueeze(-1))
        mine_rows.copy_(torch.logaddexp(mine_rows, rows))

    def _covers(self, part: Part) -> bool:
        begin, end = part.piece.queries
        return (begin, end) == (0, self.whole.queries.tokens)

    def _begin(self) -> None:
        lead = self._like.shape[:-1]
        self.out = self._like.new_zeros((*lead, self.size), dtype=torch.float32)
        self.rows = self.out.new_full(lead, -torch.inf)

    def record_stream(self, stream: Any) -> None:
        """Another stream than that of `add` reads what was merged."""
        for x in (self.out, self.rows):
            if x is not None:
                x.record_stream(stream)

    def result(self, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The result with flat heads, and its rows; the sink is one more key, without a value."""
        if self.out is None or self.rows is None:
            self._begin()
        assert self.out is not None and self.rows is not None
        out, rows = self.out, self.rows
        if sink is not None:
            rows = torch.logaddexp(rows, sink.float())
            out = out * torch.exp(self.rows - rows).unsqueeze(-1)
        return out.flatten(-2).to(self._like.dtype), rows


class _Summand(NamedTuple):
    """A gradient of some tokens, and the part of a sum that they are."""

    grad: torch.Tensor
    narrow: Callable[[torch.Tensor], torch.Tensor]
    takes_others: bool  # it is of all tokens, and may be written to


class Sums:
    """Gradients of parts added up: two with one rounding, more in fp32.

    Args:
        like: what they are the gradient of.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self.like = like
        self._total: torch.Tensor | None = None
        self._few: list[_Summand] = []

    def add(self, whole: Whole, range: Range, grad: torch.Tensor | None) -> None:
        """Add the gradient of a range of tokens, which may be written to."""
        if grad is not None:
            mine = grad.shape == self.like.shape
            self._few.append(_Summand(grad, lambda total: whole.narrow(total, range), mine))
            if self._total is not None or len(self._few) > 2:
                self.exact()

    def add_all(self, grad: torch.Tensor) -> None:
        """Add a gradient of all tokens, which is not written to."""
        self._few.append(_Summand(grad, lambda total: total, False))

    def exact(self) -> torch.Tensor:
        """In fp32."""
        for grad, narrow, _ in self._few:
            if self._total is None and grad.shape == self.like.shape:
                self._total = grad.to(torch.float32, copy=True)
                continue
            if self._total is None:
                self._total = self.like.new_zeros(self.like.shape, dtype=torch.float32)
            narrow(self._total).add_(grad)
        self._few = []
        if self._total is None:
            self._total = self.like.new_zeros(self.like.shape, dtype=torch.float32)
        return self._total

    def result(self) -> torch.Tensor:
        """In the dtype of what they are the gradient of."""
        dtype = self.like.dtype
        if self._total is None and 0 < len(self._few) < 3:
            first, *others = sorted(self._few, key=lambda summand: not summand.takes_others)
            if first.takes_others and all([x.grad.dtype is dtype for x in self._few]):
                for grad, narrow, _ in others:
                    narrow(first.grad).add_(grad)
                return first.grad
        return self.exact().to(dtype)


def add_bias_gradient(total: torch.Tensor, grad: torch.Tensor | None, part: Part) -> None:
    """Add the gradient of a block of the bias to that of all of it."""
    if grad is None:
        return
    queries = part.piece.queries
    if total.shape[-2] > 1:
        total = total.narrow(-2, queries[0], queries[1] - queries[0])
    if total.shape[-1] == 1:
        total.add_(grad)
        return
    place = 0
    for first, count in part.columns:
        total.narrow(-1, first, count).add_(grad.narrow(-1, place, count))
        place += count


def sink_gradient(
    sink: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor, out: torch.Tensor, size: int
) -> torch.Tensor:
    """Of the scores of the sink, from the tokens of this rank."""
    mean = (grad.float() * out.float()).unflatten(-1, (-1, size)).sum(-1)
    weight = torch.exp(sink.float() - rows)
    return -(weight * mean).flatten(0, -2).sum(0).to(sink.dtype)
