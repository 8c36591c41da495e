"""The sequences of a part: lengths without padding, and positions in memory.

Under context parallelism `cu_seqlens` describe whole sequences, of which a rank has some chunks. In
thd the length of a chunk differs from sequence to sequence. So `score_blocks` pretends that every
chunk has `UNIT` tokens, and `Lengths` scales the ranges that it returns to each sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from transformer_engine.pytorch.attention.context.score_blocks import Chunks, Range
from transformer_engine.pytorch.attention.core import formats
from transformer_engine.pytorch.attention.core.call import Sequences
from transformer_engine.pytorch.module.inputs import known_lengths
from transformer_engine.pytorch.parallel.order import check_chunks

UNIT = 2  # at least 2: a causal band over one token is the same as no band


class Lengths(NamedTuple):
    """The sequences that queries, or keys, are chunks of.

    Attributes:
        real: int64 `[batch]`, tokens of each whole sequence without padding.
        units: int64 `[batch]`, tokens of a chunk of each sequence, for thd; else None.
        starts: int64 `[batch]`, where each sequence begins in memory, for thd; else None.
        tokens: number of tokens in memory, for thd.
        longest: for thd, the most tokens of a whole sequence and of a chunk, or upper bounds.
        padded: whether thd has room for padding between sequences.
    """

    real: torch.Tensor
    units: torch.Tensor | None
    starts: torch.Tensor | None
    tokens: int
    longest: tuple[int, int]
    padded: bool

    def within(self, chunks: Chunks, range: Range) -> torch.Tensor:
        """int64 `[batch]`: how many tokens of a range of these chunks are no padding."""
        total = torch.zeros_like(self.real)
        for first, count in chunks.runs(range):
            if self.units is None:
                total += (self.real - first).clamp(0, count)
            else:
                begin, most = self.units * (first // UNIT), self.units * (count // UNIT)
                total += torch.minimum((self.real - begin).clamp(min=0), most)
        return total

    def sequences(self, chunks: Chunks, range: Range) -> Sequences:
        """The `Sequences` of a part's call."""
        real = self.within(chunks, range)
        ends = torch.nn.functional.pad(real.cumsum(0), (1, 0)).to(torch.int32)
        if self.units is None or self.starts is None:
            return Sequences(ends)
        if not self.padded and range == (0, chunks.tokens):
            return Sequences(ends, None, self._longest(range))
        begins = self.starts + self.units * (range[0] // UNIT)
        begins = torch.nn.functional.pad(begins, (0, 1), value=self.tokens).to(torch.int32)
        return Sequences(ends, begins, self._longest(range))

    def _longest(self, range: Range) -> int:
        """Upper bound of the lengths in a part; at least 1, because kernels take no 0."""
        sequence, chunk = self.longest
        return max(1, min(sequence, chunk * ((range[1] - range[0]) // UNIT)))

    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For each thd token in memory: its sequence, and its place among the sequence's tokens."""
        assert self.starts is not None
        token = torch.arange(self.tokens, device=self.starts.device)
        sequence = (torch.searchsorted(self.starts, token, right=True) - 1).clamp_(min=0)
        return sequence, token - self.starts[sequence]


def lengths_of(
    sequences: Sequences, parameter: str, qkv_format: str, ranks: int, shares: int, tokens: int
) -> Lengths:
    """The lengths of queries, or of keys, after checks.

    Errors name the argument `parameter`, such as `cu_seqlens_q`. Memory holds `tokens` tokens: one
    of `shares` equal shares of each sequence.
    """
    cu_seqlens, starts = sequences.checked(parameter)
    if qkv_format != "thd":
        formats.check_lengths(tokens * shares, cu_seqlens, parameter)
        return Lengths(cu_seqlens.to(torch.int64).diff(), None, None, tokens, (0, 0), True)
    check_packed(sequences, parameter, ranks, tokens * shares)
    if cu_seqlens.shape[0] == 1:  # no sequence: the same as one without tokens
        cu_seqlens, starts = cu_seqlens.expand(2), None
    real = cu_seqlens.to(torch.int64).diff()
    whole = (cu_seqlens if starts is None else starts).to(torch.int64)
    units = whole.diff() // (2 * ranks)
    begins = whole[:-1] // shares
    longest = _longest(real, units, sequences.longest, starts is not None, ranks)
    return Lengths(real, units, begins, tokens, longest, starts is not None)


def _longest(
    real: torch.Tensor, units: torch.Tensor, longest: int | None, padded: bool, ranks: int
) -> tuple[int, int]:
    """`Lengths.longest`. If `max_seqlen` is unknown, the host reads it from the device."""
    if longest is None:
        most = torch.stack((real, units)).amax(1).tolist() if real.numel() else [0, 0]
        return most[0], most[1]
    return longest, longest if padded else -(-longest // (2 * ranks))


def check_packed(sequences: Sequences, parameter: str, ranks: int, tokens: int) -> None:
    """Raise ValueError or TypeError unless all thd sequences can be cut into equal chunks."""
    cu_seqlens, starts = sequences.checked(parameter)
    name, whole = (parameter, cu_seqlens) if starts is None else (f"{parameter}_padded", starts)
    advice = "pad them and give cu_seqlens_q_padded and cu_seqlens_kv_padded"
    check_chunks("attention", name, known_lengths(whole), ranks, advice)
    formats.check_ends(tokens, cu_seqlens, starts, sequences.longest, parameter)
