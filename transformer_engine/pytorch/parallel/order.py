"""Two orders of tokens: by rank, as context parallel ranks have them, and by sequence.

`[ranks, ...]` holds the tokens of each rank. A sequence is cut into `2 * ranks` chunks, of which
rank r has the chunks r and `2 * ranks - 1 - r`. With causal masks, late tokens attend to more keys
than early ones; one early and one late chunk give all ranks the same amount of work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def check_chunks(
    op: str, what: str, lengths: Sequence[int], ranks: int, advice: str = "pad them"
) -> None:
    """Raise ValueError unless each of these sequences can be cut into `2 * ranks` chunks."""
    uneven = [length for length in lengths if length % (2 * ranks)]
    if uneven:
        raise ValueError(
            f"[{op}] expected {what} with lengths divisible by {2 * ranks} (twice the context"
            f" parallel ranks), got sequences of {uneven[:4]} tokens; {advice}"
        )


def to_sequence_order(
    stack: torch.Tensor, dim: int, starts: torch.Tensor | None = None
) -> torch.Tensor:
    """Reorder tokens by rank into whole sequences.

    Args:
        stack: `[ranks, ...]`.
        dim: dimension of tokens in the tensor of one rank.
        starts: `[batch + 1]`, for thd: where each sequence begins and the last one ends.
    """
    ranks = stack.shape[0]
    if starts is not None:
        tokens = ranks * stack.shape[1]
        return stack.flatten(0, 1).index_select(0, rank_order_positions(starts, ranks, tokens))
    halves = [part.chunk(2, dim) for part in stack]
    return torch.cat([first for first, _ in halves] + [last for _, last in halves[::-1]], dim)


def to_rank_order(
    whole: torch.Tensor, dim: int, ranks: int, starts: torch.Tensor | None = None
) -> torch.Tensor:
    """Reorder whole sequences into `[ranks, ...]`; the inverse of `to_sequence_order`."""
    if starts is not None:
        tokens = whole.shape[0]
        stack = torch.empty_like(whole)
        stack.index_copy_(0, rank_order_positions(starts, ranks, tokens), whole)
        return stack.unflatten(0, (ranks, tokens // ranks))
    chunks = whole.chunk(2 * ranks, dim)
    return torch.stack(
        [torch.cat((chunks[r], chunks[2 * ranks - 1 - r]), dim) for r in range(ranks)]
    )


def rank_order_positions(starts: torch.Tensor, ranks: int, tokens: int) -> torch.Tensor:
    """int64 `[tokens]`: the position of each token of thd in the order by rank.

    Tokens behind the last sequence (padding) fill the places that are left on each rank.
    """
    starts = starts.to(torch.int64)
    if starts.shape[0] == 1:  # no sequence: the same as one without tokens
        starts = starts.expand(2)
    token = torch.arange(tokens, device=starts.device)
    sequence = (torch.searchsorted(starts[:-1], token, right=True) - 1).clamp_(min=0)
    chunk_length = (starts.diff() // (2 * ranks))[sequence].clamp(min=1)
    offset = token - starts[sequence]
    chunk = offset // chunk_length
    is_first = chunk < ranks
    rank = torch.where(is_first, chunk, 2 * ranks - 1 - chunk)
    position = starts[sequence] // ranks + offset % chunk_length
    position = position + torch.where(is_first, 0, chunk_length)
    behind_last = token - starts[-1]
    per_rank = tokens // ranks
    free = (per_rank - starts[-1] // ranks).clamp(min=1)
    rank = torch.where(behind_last < 0, rank, behind_last // free)
    position = torch.where(behind_last < 0, position, starts[-1] // ranks + behind_last % free)
    return rank * per_rank + position


def tokens_of_rank(starts: torch.Tensor, ranks: int, rank: int, tokens: int) -> torch.Tensor:
    """int64 `[tokens / ranks]`: the indices of a rank's tokens in thd, in the rank's order."""
    positions = rank_order_positions(starts, ranks, tokens)
    token_at = torch.empty_like(positions)
    token_at[positions] = torch.arange(tokens, device=positions.device)
    per_rank = tokens // ranks
    return token_at[rank * per_rank : (rank + 1) * per_rank]
