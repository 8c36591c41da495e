"""From the tokens that each rank has to those of whole sequences, and back."""

from __future__ import annotations

import torch


def in_order(stack: torch.Tensor, dim: int, starts: torch.Tensor | None = None) -> torch.Tensor:
    """The tokens of all ranks `[ranks, ...]`, in their order in the sequences.

    Args:
        stack: of each rank the tokens that it has.
        dim: of tokens, in what a rank has.
        starts: `[batch + 1]`, where each sequence begins and the last ends, if they are one after
            the other in dimension 0.
    """
    ranks = stack.shape[0]
    if starts is not None:
        tokens = ranks * stack.shape[1]
        return stack.flatten(0, 1).index_select(0, rows_in_order(starts, ranks, tokens))
    halves = [part.chunk(2, dim) for part in stack]
    return torch.cat([first for first, _ in halves] + [last for _, last in halves[::-1]], dim)


def by_rank(
    whole: torch.Tensor, dim: int, ranks: int, starts: torch.Tensor | None = None
) -> torch.Tensor:
    """`[ranks, ...]`: what each rank has of whole sequences; `in_order` takes it back."""
    if starts is not None:
        tokens = whole.shape[0]
        stack = torch.empty_like(whole)
        stack.index_copy_(0, rows_in_order(starts, ranks, tokens), whole)
        return stack.unflatten(0, (ranks, tokens // ranks))
    chunks = whole.chunk(2 * ranks, dim)
    return torch.stack(
        [torch.cat((chunks[r], chunks[2 * ranks - 1 - r]), dim) for r in range(ranks)]
    )


def rows_in_order(starts: torch.Tensor, ranks: int, tokens: int) -> torch.Tensor:
    """int64 `[tokens]`: where a token of thd is among those of rank 0, of rank 1, and so on.

    Tokens behind the last sequence belong to no rank in particular: they fill what is left.
    """
    starts = starts.to(torch.int64)
    token = torch.arange(tokens, device=starts.device)
    sequence = (torch.searchsorted(starts[:-1], token, right=True) - 1).clamp_(min=0)
    unit = (starts.diff() // (2 * ranks))[sequence].clamp(min=1)
    step = token - starts[sequence]
    chunk = step // unit
    first = chunk < ranks
    rank = torch.where(first, chunk, 2 * ranks - 1 - chunk)
    place = starts[sequence] // ranks + step % unit + torch.where(first, 0, unit)
    behind = token - starts[-1]  # of the last sequence
    share = tokens // ranks
    left = share - starts[-1] // ranks
    rank = torch.where(behind < 0, rank, behind // left.clamp(min=1))
    place = torch.where(behind < 0, place, starts[-1] // ranks + behind % left.clamp(min=1))
    return rank * share + place


def rows_of_rank(starts: torch.Tensor, ranks: int, rank: int, tokens: int) -> torch.Tensor:
    """int64 `[tokens / ranks]`: the tokens of thd that a rank has, in its order."""
    places = rows_in_order(starts, ranks, tokens)
    whole = torch.empty_like(places)
    whole[places] = torch.arange(tokens, device=places.device)
    share = tokens // ranks
    return whole[rank * share : (rank + 1) * share]
