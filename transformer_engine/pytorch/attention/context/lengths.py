"""Real lengths and places of the sequences of a part, where there is padding.

`cu_seqlens` of a call under context parallelism are those of whole sequences. In thd each sequence
is cut into chunks of its own length: geometry counts in chunks there, each of `UNIT` tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from transformer_engine.pytorch.attention.context.spans import Range, Side
from transformer_engine.pytorch.attention.core import formats
from transformer_engine.pytorch.attention.core.call import Sequences

UNIT = 2  # a chunk of one would make a diagonal of one, which is no band


class Lengths(NamedTuple):
    """The sequences of a side.

    Attributes:
        real: int64 `[batch]`, tokens of the whole sequence without padding.
        units: int64 `[batch]`, tokens of a chunk of each sequence of thd; None of other formats.
        starts: int64 `[batch]`, where in memory each sequence of thd begins on this side; likewise.
        tokens: in memory, of thd.
        longest: of whole sequences, or more; and of chunks, or more.
        padded: thd has room for padding.
    """

    real: torch.Tensor
    units: torch.Tensor | None
    starts: torch.Tensor | None
    tokens: int
    longest: tuple[int, int]
    padded: bool

    def of(self, side: Side, range: Range) -> torch.Tensor:
        """int64 `[batch]`: real tokens in a range of the side."""
        total = torch.zeros_like(self.real)
        for first, count in side.stretches(range):
            if self.units is None:
                total += (self.real - first).clamp(0, count)
            else:
                begin, most = self.units * (first // UNIT), self.units * (count // UNIT)
                total += torch.minimum((self.real - begin).clamp(min=0), most)
        return total

    def sequences(self, side: Side, range: Range) -> Sequences:
        """What a call of the part is told."""
        real = self.of(side, range)
        ends = torch.nn.functional.pad(real.cumsum(0), (1, 0)).to(torch.int32)
        if self.units is None or self.starts is None:
            return Sequences(ends)
        if not self.padded and range == (0, side.tokens):
            return Sequences(ends, None, self._longest(side, range))
        begins = self.starts + self.units * (range[0] // UNIT)
        begins = torch.nn.functional.pad(begins, (0, 1), value=self.tokens).to(torch.int32)
        return Sequences(ends, begins, self._longest(side, range))

    def _longest(self, side: Side, range: Range) -> int:
        """Of a part; no kernel is asked for sequences of nothing."""
        sequence, chunk = self.longest
        return max(1, min(sequence, chunk * ((range[1] - range[0]) // UNIT)))

    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each token of thd in memory: its sequence, and its place in that."""
        assert self.starts is not None
        token = torch.arange(self.tokens, device=self.starts.device)
        sequence = (torch.searchsorted(self.starts, token, right=True) - 1).clamp_(min=0)
        return sequence, token - self.starts[sequence]


def lengths_of(
    sequences: Sequences, parameter: str, qkv_format: str, ranks: int, share: int, tokens: int
) -> Lengths:
    """Of a side that holds one of `share` parts of each sequence, of `ranks` ranks."""
    cu_seqlens, starts = sequences.checked(parameter)
    real = cu_seqlens.to(torch.int64).diff()
    if qkv_format != "thd":
        return Lengths(real, None, None, tokens, (0, 0), True)
    whole = cu_seqlens if starts is None else starts
    check_chunks(whole, ranks, parameter if starts is None else f"{parameter}_padded")
    formats.check_ends(tokens * share, cu_seqlens, starts, sequences.longest, parameter)
    whole = whole.to(torch.int64)
    units = whole.diff() // (2 * ranks)
    begins = whole[:-1] // share
    longest = _longest(real, units, sequences.longest, starts is not None, ranks)
    return Lengths(real, units, begins, tokens, longest, starts is not None)


def _longest(
    real: torch.Tensor, units: torch.Tensor, longest: int | None, padded: bool, ranks: int
) -> tuple[int, int]:
    """See `Lengths`; without `max_seqlen` the host waits for the device, once a call."""
    if longest is None:
        most = torch.stack((real, units)).amax(1).tolist() if real.numel() else [0, 0]
        return most[0], most[1]
    return longest, longest if padded else -(-longest // (2 * ranks))


def check_chunks(starts: torch.Tensor, ranks: int, parameter: str) -> None:
    """Every sequence of thd can be cut into chunks; looked at on the CPU alone."""
    if starts.device.type != "cpu":
        return
    uneven = [length for length in starts.diff().tolist() if length % (2 * ranks)]
    if uneven:
        raise ValueError(
            f"[attention] expected {parameter} with lengths divisible by {2 * ranks} (twice the"
            f" context parallel ranks), got sequences of {uneven[:4]} tokens; pad them and give"
            " cu_seqlens_q_padded and cu_seqlens_kv_padded"
        )
