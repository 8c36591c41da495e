"""The tokens of packed sequences that belong to a rank under context parallelism."""

from __future__ import annotations

import itertools

import torch


def thd_get_partitioned_indices(
    cu_seqlens: torch.Tensor, total_tokens: int, world_size: int, rank: int
) -> torch.Tensor:
    """The indices of one rank's tokens, such that causal attention is equal work for all ranks.

    Each sequence is divided into `2 * world_size` chunks of equal length, and rank r has the chunks
    r and `2 * world_size - 1 - r`.

    Args:
        cu_seqlens: int32 `[sequences + 1]`: the start of each sequence, and the end of the last.
        total_tokens: number of tokens of all sequences.
        world_size: number of ranks.
        rank: the rank whose tokens are returned.

    Returns:
        int32 `[total_tokens // world_size]` on the device of `cu_seqlens`, in memory order.

    Raises:
        ValueError: a sequence cannot be divided in this way, `cu_seqlens` does not end with
            `total_tokens`, or `rank` does not exist.

    >>> thd_get_partitioned_indices(torch.tensor([0, 8], dtype=torch.int32), 8, 2, 0).tolist()
    [0, 1, 6, 7]
    """
    chunks = 2 * world_size
    if not 0 <= rank < world_size:
        raise ValueError(
            f"[thd_get_partitioned_indices] expected 0 <= rank < {world_size}, got {rank}"
        )
    ends = cu_seqlens.tolist()
    if any((end - start) % chunks for start, end in itertools.pairwise(ends)):
        raise ValueError(
            "[thd_get_partitioned_indices] expected sequence lengths divisible by "
            f"2 * world_size = {chunks}, got cu_seqlens {ends}"
        )
    if ends[0] != 0 or ends[-1] != total_tokens:
        raise ValueError(
            f"[thd_get_partitioned_indices] expected cu_seqlens from 0 to {total_tokens}, "
            f"got {ends}"
        )
    token = torch.arange(total_tokens, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.bucketize(token, cu_seqlens[1:], right=True)
    start, length = cu_seqlens[:-1], cu_seqlens.diff()
    chunk = (token - start[sequence]) // (length[sequence] // chunks).clamp(min=1)
    return token[(chunk == rank) | (chunk == chunks - 1 - rank)]
