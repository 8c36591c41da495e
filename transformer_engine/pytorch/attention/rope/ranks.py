"""Angles for the tokens of a context parallel rank: of n ranks, rank r has chunks r and 2n-1-r."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from transformer_engine.pytorch.module.arguments import check_sizes
from transformer_engine.pytorch.module.inputs import known_lengths
from transformer_engine.pytorch.parallel.order import check_chunks


def check_rank(cp_size: int, cp_rank: int) -> None:
    """Raise ValueError unless `0 <= cp_rank < cp_size`, TypeError unless they are ints."""
    check_sizes("apply_rotary_pos_emb", None, 0, cp_size=cp_size, cp_rank=cp_rank)
    if not 0 <= cp_rank < cp_size:
        raise ValueError(
            f"[apply_rotary_pos_emb] expected 0 <= cp_rank < cp_size, got cp_rank={cp_rank} and"
            f" cp_size={cp_size}"
        )


def angles_of_rank(
    freqs: torch.Tensor, length: int, starts: torch.Tensor | None, cp_size: int, cp_rank: int
) -> torch.Tensor:
    """The angles of a rank's `length` tokens, in its order, from the angles of whole sequences."""
    if starts is not None:
        _refuse("start_positions=None, or tensor_format 'thd',", "start_positions")
    if length % 2:
        _refuse("two chunks of equal length on each rank", f"{length} tokens")
    chunk = length // 2
    parts = [freqs.narrow(0, n * chunk, chunk) for n in (cp_rank, 2 * cp_size - 1 - cp_rank)]
    return torch.cat(parts)


def sequences_of_rank(
    cu_seqlens: torch.Tensor, starts: torch.Tensor | None, cp_size: int, cp_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cu_seqlens` and start positions of a rank's thd tokens, with each chunk as a sequence.

    Args:
        cu_seqlens: int32 `[batch + 1]`, ends of the whole sequences, after a 0.
        starts: int32 `[batch]`, the position of each sequence's first token; None for 0.
        cp_size: number of ranks.
        cp_rank: number of this rank.

    Returns:
        int32 `[2 * batch + 1]`, where the chunks end, and `[2 * batch]`, the position of the first
        token of each chunk.
    """
    lengths = cu_seqlens.diff()
    check_chunks("apply_rotary_pos_emb", "cu_seqlens", known_lengths(cu_seqlens), cp_size)
    unit = lengths // (2 * cp_size)
    begins = torch.stack((cu_seqlens[:-1] // cp_size, cu_seqlens[:-1] // cp_size + unit), 1)
    ends = torch.cat((begins.flatten(), cu_seqlens[-1:] // cp_size))
    positions = torch.stack((unit * cp_rank, unit * (2 * cp_size - 1 - cp_rank)), 1)
    if starts is not None:
        positions = positions + starts[:, None]
    return ends.to(torch.int32), positions.flatten().to(torch.int32)


def _refuse(expected: str, got: Any) -> NoReturn:
    raise ValueError(f"[apply_rotary_pos_emb] expected {expected} with cp_size > 1, got {got}")
