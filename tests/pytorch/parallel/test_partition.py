"""Which tokens of packed sequences a context parallel rank holds."""

import pytest
import torch

import transformer_engine_torch as tex


def by_definition(lengths: list[int], ranks: int, rank: int) -> list[int]:
    """Chunks `rank` and `2 ranks - 1 - rank` of every sequence, one token at a time."""
    tokens, start = [], 0
    for length in lengths:
        chunk = length // (2 * ranks)
        for index in (rank, 2 * ranks - 1 - rank):
            tokens += range(start + index * chunk, start + (index + 1) * chunk)
        start += length
    return tokens


@pytest.mark.parametrize("lengths", [[8], [8, 24, 16], [0, 16, 0]])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_holds_two_chunks_of_each_sequence(
    lengths: list[int], ranks: int, device: str
) -> None:
    ends = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0).int()
    for rank in range(ranks):
        got = tex.thd_get_partitioned_indices(ends, sum(lengths), ranks, rank)
        assert got.dtype is torch.int32 and got.device == ends.device
        assert got.tolist() == by_definition(lengths, ranks, rank)


def test_refusals() -> None:
    ends = torch.tensor([0, 12], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"divisible by 2 \* world_size = 8, got .*\[0, 12\]"):
        tex.thd_get_partitioned_indices(ends, 12, 4, 0)
    with pytest.raises(ValueError, match="0 <= rank < 2, got 2"):
        tex.thd_get_partitioned_indices(ends, 12, 2, 2)
    with pytest.raises(ValueError, match=r"from 0 to 16, got \[0, 12\]"):
        tex.thd_get_partitioned_indices(ends, 16, 2, 0)
