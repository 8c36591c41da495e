"""Blocks of context parallel attention: each pair of a query and a key it sees is in one block."""

from itertools import product

import pytest
from attention_reference import sees

from transformer_engine.pytorch.attention.context.score_blocks import (
    Chunks,
    chunks_of_all,
    chunks_of_rank,
    score_blocks,
    with_square_bands,
)

BANDS = [(-1, -1), (-1, 0), (0, 0), (3, 0), (7, 0), (2, 5), (-1, 4), (5, -1), (0, 12)]


def places(chunks: Chunks) -> list[int]:
    return [chunk * chunks.length + i for chunk in chunks.numbers for i in range(chunks.length)]


def pairs(found) -> list[tuple[int, int]]:
    """Returns the pairs in all blocks, as places in memory; bands end at the bottom right."""
    seen = []
    for (begin, end), (first, last), left, right in found:
        queries, keys = end - begin, last - first
        for i, j in product(range(queries), range(keys)):
            diagonal = i + keys - queries
            if (left < 0 or j >= diagonal - left) and (right < 0 or j <= diagonal + right):
                seen.append((begin + i, first + j))
    return seen


@pytest.mark.parametrize("lengths", [(4, 4), (3, 5), (5, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_pair_that_sees_is_in_one_part(band, ranks, lengths):
    left, right = band
    for shift, rank in product((0, 2 * ranks * (lengths[1] - lengths[0])), range(ranks)):
        queries = chunks_of_rank(rank, ranks, lengths[0])
        others = [chunks_of_rank(other, ranks, lengths[1]) for other in range(ranks)]
        for keys in (*others, chunks_of_all(ranks, lengths[1])):
            found = score_blocks(left, right, shift, queries, keys)
            of_keys = places(keys)
            expected = [
                (i, j)
                for i, query in enumerate(places(queries))
                for j, key in enumerate(of_keys)
                if (left < 0 or key >= query + shift - left)
                and (right < 0 or key <= query + shift + right)
            ]
            assert sorted(pairs(found)) == expected
            assert all(block.left >= -1 and block.right >= -1 for block in found)


def test_causal_masks_leave_one_part_to_each_meeting():
    for rank, other in product(range(4), range(4)):
        (block,) = score_blocks(-1, 0, 0, chunks_of_rank(rank, 4, 8), chunks_of_rank(other, 4, 8))
        if rank == other:
            assert block == ((0, 16), (0, 16), -1, 0)
        elif other < rank:
            assert block == ((0, 16), (0, 8), -1, -1)
        else:
            assert block == ((8, 16), (0, 16), -1, -1)


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("rank", range(3))
def test_square_bands_hold_the_same_pairs(rank, band):
    blocks = score_blocks(*band, 0, chunks_of_rank(rank, 3, 4), chunks_of_all(3, 4))
    found = with_square_bands(blocks)
    assert sorted(pairs(found)) == sorted(pairs(blocks))
    for queries, keys, left, right in found:
        if (left, right) == (-1, 0):
            assert queries[1] - queries[0] == keys[1] - keys[0]
    assert band != (-1, 0) or len(found) > len(blocks)


def test_the_definition_is_that_of_masks():
    assert sees("causal", None, 3, 3, 8, 8) and not sees("causal", None, 3, 4, 8, 8)
