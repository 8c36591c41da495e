"""Parts of a call: attention of a block of queries and keys, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from transformer_engine import _C
from transformer_engine.pytorch.attention.backends import unfused
from transformer_engine.pytorch.attention.backends.backend import Backend, Gradients, Needs, Saved
from transformer_engine.pytorch.attention.backends.choice import choose_inside
from transformer_engine.pytorch.attention.context.lengths import UNIT, Lengths, lengths_of
from transformer_engine.pytorch.attention.context.score_blocks import (
    Chunks,
    Range,
    ScoreBlock,
    score_blocks,
    with_square_bands,
)
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
from transformer_engine.pytorch.capture import NotRecordedError, memoize

_ALL = Needs(True, True, True)
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class AttentionPart(NamedTuple):
    """Attention of a block of queries and keys.

    Attributes:
        block: ranges of the queries and keys, and the band of the mask.
        call: the call of attention that computes the part.
        has_keys: bool, broadcastable to `[..., heads]`, False for queries that are padding or see
            no key; None if there is no padding.
        key_runs: the keys in the whole sequence, as (first token, count) of each run.
    """

    block: ScoreBlock
    call: Call
    has_keys: torch.Tensor | None
    key_runs: list[Range]


class SavedPart(NamedTuple):
    """What the forward of a part saves, without tensors that all parts share; see `Parts.strip`."""

    backend: Backend
    saved: Saved


class RankCall:
    """A call of attention on one rank, which runs as parts.

    Args:
        call: the call with its tensors, for all chunks of this rank.
        ranks: number of ranks in the ring, or in the group that gathers.
        queries: the chunks that this rank has.
        key_shares: keys in memory are one of this many equal shares of each sequence.
        tokens: number of queries and number of keys in memory.
        device: where the call runs. It is an argument because the tensors of a call that is being
            recorded are stand-ins on the CPU.

    Attributes:
        query_lengths: of query sequences; None without padding.
        key_lengths: of key sequences; None without padding.

    Raises:
        ValueError: `cu_seqlens` that do not fit the tokens.
        TypeError: `cu_seqlens` of another type.
    """

    def __init__(
        self,
        call: Call,
        ranks: int,
        queries: Chunks,
        key_shares: int,
        tokens: tuple[int, int],
        device: torch.device,
    ) -> None:
        self.call = call
        self.device = device
        self.ranks = ranks
        self.queries = queries
        self.tokens = tokens
        self.rule = call.shape.rule
        self.packed = call.shape.qkv_format == "thd"
        self.dim = sequence_dim(call.shape.qkv_format)
        # Lengths are checked here, before any exchange: all ranks have the same ones, so all raise.
        self.query_lengths = self._lengths(call.query_sequences, "cu_seqlens_q", ranks, 0)
        self.key_lengths = self._lengths(call.key_sequences, "cu_seqlens_kv", key_shares, 1)

    def _lengths(self, sequences: Sequences, name: str, shares: int, side: int) -> Lengths | None:
        if not self.rule.type.padding:
            return None
        qkv_format = self.call.shape.qkv_format
        return lengths_of(sequences, name, qkv_format, self.ranks, shares, self.tokens[side])

    @cached_property
    def query_places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`Lengths.places` of queries."""
        assert self.query_lengths is not None
        return self.query_lengths.places()

    def parts(self, keys: Chunks) -> Iterator[AttentionPart]:
        """The parts in which this rank's queries see some of these keys."""
        left, right, shift = self.rule.left, self.rule.right, 0
        if self.packed:
            left = -1  # the length of a chunk differs by sequence; `_part_shape` sets the limit
        elif self.rule.bottom_right:
            shift = (keys.length - self.queries.length) * 2 * self.ranks
        blocks = score_blocks(left, right, shift, self.queries, keys)
        casts = self.call.casts
        if casts is not None and casts.by_cudnn:
            blocks = with_square_bands(blocks)
        for block in blocks:
            yield self._part(block, keys)

    def _part(self, block: ScoreBlock, keys: Chunks) -> AttentionPart:
        call, key_runs = self.call, keys.runs(block.keys)
        tokens = self.tokens if self.packed else None
        shape = _part_shape(call.shape, block, tokens)
        queries, key_sequences, has_keys = self._sequences(block, keys)
        mask: Any = call.attention_mask if self.rule.type.arbitrary else None
        bias = call.bias
        if isinstance(mask, torch.Tensor):
            mask = slice_scores(mask, block.queries, key_runs)
        if bias.tensor is not None:
            bias = Bias(bias.type, slice_scores(bias.tensor, block.queries, key_runs))
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
        return AttentionPart(block, own, has_keys, key_runs)

    def _sequences(
        self, block: ScoreBlock, keys: Chunks
    ) -> tuple[Sequences, Sequences, torch.Tensor | None]:
        """Sequences of the queries and of the keys of a block, and `AttentionPart.has_keys`."""
        lengths, key_lengths = self.query_lengths, self.key_lengths
        if lengths is None or key_lengths is None:
            return Sequences(), Sequences(), None
        queries = lengths.sequences(self.queries, block.queries)
        alike = self.call.same_sequences and keys == self.queries and block.keys == block.queries
        key_sequences = queries if alike else key_lengths.sequences(keys, block.keys)
        real = lengths.within(self.queries, block.queries)
        real = torch.where(key_lengths.within(keys, block.keys) > 0, real, 0)
        if self.packed:
            assert lengths.units is not None
            sequence, place = self.query_places
            begin = lengths.units[sequence] * (block.queries[0] // UNIT)
            has_keys = (place >= begin) & (place < begin + real[sequence])
            return queries, key_sequences, has_keys[:, None]
        count = block.queries[1] - block.queries[0]
        has_keys = torch.arange(count, device=real.device) < real[:, None]
        has_keys = has_keys.t() if self.call.shape.qkv_format == "sbhd" else has_keys
        return queries, key_sequences, has_keys.unsqueeze(-1)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """A query, key or value as the backward takes it: in FP8 attention the values of codes."""
        casts = self.call.casts
        return x if casts is None else casts.values(x)

    def dtype(self, x: torch.Tensor) -> torch.dtype:
        """The dtype of `values(x)`."""
        casts = self.call.casts
        return x.dtype if casts is None else casts.dtype

    def narrow(self, x: torch.Tensor, range: Range) -> torch.Tensor:
        """A range of tokens. For thd it is all of `x`, and the call's `Sequences` say which."""
        if self.packed:
            return x
        return x.narrow(self.dim, range[0], range[1] - range[0])


def slice_scores(x: torch.Tensor, queries: Range, key_runs: list[Range]) -> torch.Tensor:
    """A block of a mask or bias `[..., queries of this rank, keys of all ranks]`.

    Dimensions of size 1, which broadcast, stay as they are.
    """
    if x.dim() > 1 and x.shape[-2] > 1:
        x = x.narrow(-2, queries[0], queries[1] - queries[0])
    if x.dim() > 0 and x.shape[-1] > 1:
        parts = [x.narrow(-1, first, count) for first, count in key_runs]
        x = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return x


@memoize
def _part_shape(shape: CallShape, block: ScoreBlock, tokens: tuple[int, int] | None) -> CallShape:
    """The shape of a part's call; `tokens`, for thd only, are the queries and keys in memory."""
    queries, keys = (end - begin for begin, end in (block.queries, block.keys))
    kind, left = shape.rule.type, block.left
    if tokens is not None:
        left = shape.rule.left
    causal = block.right == 0
    bottom_right = queries != keys
    rule = MaskRule(
        MaskType(kind.padding, causal, causal and bottom_right, kind.arbitrary),
        left,
        block.right,
        bottom_right or not causal,
    )
    if tokens is not None:
        queries, keys = tokens
    plain = not (kind.padding or kind.arbitrary)
    band = build_mask(rule, queries, keys) if plain else None
    return replace(shape, rule=rule, band=band, queries=queries, keys=keys)


def part_forward(
    inputs: Inputs, part: AttentionPart, needs: Needs, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, SavedPart]:
    """Run a part; `inputs` are query, key and value, in FP8 attention their codes.

    Raises:
        NotRecordedError: while recording, if calls of the backend cannot be recorded.

    Returns:
        The result, its log-sum-exp `[..., heads]` (infinite for queries that see no key of the
        part), and what the backward needs.
    """
    call = part.call
    backend = backend_of(part, inputs[0].dtype, needs, device)
    parts = backend.parts
    assert parts is not None, "the table of requirements refuses others"
    if _C.is_recording() and not backend.recordable(call):
        raise NotRecordedError(f"attention by the backend {backend.name}")
    call = with_seed(call, backend, device)
    if call.casts is not None and not parts.takes_codes:
        query, key, value = inputs
        inputs = call.casts.values(query), call.casts.values(key), call.casts.values(value)
    with torch.no_grad():
        out, saved = backend.forward(*inputs, call, _ALL._replace(bias=needs.bias))
        assert saved is not None
        log_sum_exp = parts.log_sum_exp(saved, call)
        stripped = parts.strip(saved, call)
    if part.has_keys is not None:
        log_sum_exp = log_sum_exp.masked_fill(~part.has_keys, -torch.inf)
    return out, log_sum_exp, SavedPart(backend, stripped)


def backend_of(
    part: AttentionPart, dtype: torch.dtype, needs: Needs, device: torch.device
) -> Backend:
    """The backend of a part; `dtype` is that of the query in high precision.

    Raises:
        ValueError: all backends refuse.
    """
    casts = part.call.casts
    if casts is not None:
        # `dtype_of_parts` has chosen it: cuDNN may take some parts of the call, but not all.
        if not casts.by_cudnn:
            return unfused.BACKEND
        dtype = casts.dtype
    return choose_inside(device, dtype, needs, part.call)


def with_seed(call: Call, backend: Backend, device: torch.device) -> Call:
    """The call, with a new seed for dropout if the backend takes one."""
    draw = backend.draw_seed
    if draw is None or call.dropout.p == 0.0:
        return call
    return call._replace(dropout=call.dropout._replace(seed=draw(device)))


def part_backward(
    grad: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    log_sum_exp: torch.Tensor,
    part: AttentionPart,
    saved_part: SavedPart,
    needs: Needs,
) -> Gradients:
    """Gradients of a part.

    `grad` is the gradient of the merged result, for the queries of the part; `tensors` are query,
    key, value and merged result; `log_sum_exp` is over all keys, +inf for queries that see none.
    """
    backend, stripped = saved_part
    assert backend.parts is not None
    saved = backend.parts.restore(stripped, tensors, log_sum_exp, part.call)
    return backend.backward(grad, saved, part.call.settings(), needs)
