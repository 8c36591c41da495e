"""Which queries see which keys, where both are chunks of a sequence: blocks of the score matrix.

A block is a range of queries and a range of keys, each contiguous in memory, with a band mask whose
diagonal ends at the bottom right. Query i of n sees key j of m if (a limit of -1 does not apply)

    i + m - n - left <= j <= i + m - n + right

Example: rank 1 of 2 has chunks 1 and 2. With a causal mask its queries and the keys of rank 0,
chunks 0 and 3, make one block without a mask: all queries see all of chunk 0, and none of chunk 3.
"""

from __future__ import annotations

from typing import NamedTuple

from transformer_engine.pytorch.capture import memoize

Range = tuple[int, int]


class Chunks(NamedTuple):
    """Chunks of a sequence, one after the other in memory.

    Attributes:
        numbers: numbers of the chunks in the sequence, in the order in which they lie in memory.
        length: tokens of a chunk.
    """

    numbers: tuple[int, ...]
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of all chunks."""
        return len(self.numbers) * self.length

    def runs(self, range: Range) -> list[Range]:
        """The runs of the sequence that a range in memory holds, each as (first token, count)."""
        found: list[Range] = []
        for place, number in enumerate(self.numbers):
            begin = max(range[0], place * self.length)
            end = min(range[1], (place + 1) * self.length)
            first = number * self.length + begin - place * self.length
            if begin >= end:
                continue
            if found and sum(found[-1]) == first:
                found[-1] = (found[-1][0], found[-1][1] + end - begin)
            else:
                found.append((first, end - begin))
        return found


def chunks_of_rank(rank: int, ranks: int, length: int) -> Chunks:
    """The two chunks of a rank."""
    return Chunks((rank, 2 * ranks - 1 - rank), length)


def chunks_of_all(ranks: int, length: int) -> Chunks:
    """The chunks of all ranks, in the order of the sequence."""
    return Chunks(tuple(range(2 * ranks)), length)


class ScoreBlock(NamedTuple):
    """A block: ranges of tokens in memory, and the limits of its band."""

    queries: Range
    keys: Range
    left: int = -1
    right: int = -1

    @property
    def full(self) -> bool:
        """Every query sees every key."""
        return self.left < 0 and self.right < 0


@memoize
def score_blocks(
    left: int, right: int, shift: int, queries: Chunks, keys: Chunks
) -> tuple[ScoreBlock, ...]:
    """The blocks that hold every pair of a query and a key that it sees, each pair once.

    Args:
        left: query i of the sequence sees keys from `i + shift - left` on; -1 is no limit.
        right: query i sees keys up to `i + shift + right`; -1 is no limit.
        shift: the key on the diagonal of query 0.
        queries: of one rank.
        keys: of the same or another rank, or of all ranks.
    """
    if queries == keys and shift == 0 and (left, right) == (-1, 0):
        # The order of chunks in memory is that of the sequence, so memory has the same diagonal.
        whole = (0, queries.tokens)
        return (ScoreBlock(whole, whole, -1, 0),)
    found = []
    query_place = 0
    for query_first, query_count in queries.runs((0, queries.tokens)):
        key_place = 0
        for key_first, key_count in keys.runs((0, keys.tokens)):
            diagonal = query_first + shift - key_first
            block = _cut(query_count, key_count, left, right, diagonal)
            if block is not None:
                found.append(_moved(block, query_place, key_place))
            key_place += key_count
        query_place += query_count
    return tuple(_joined_along_queries(_joined_along_keys(found)))


@memoize
def with_square_bands(blocks: tuple[ScoreBlock, ...]) -> tuple[ScoreBlock, ...]:
    """The same pairs, but a causal block with more keys than queries becomes two blocks.

    In the first of them every query sees all keys; the second is causal, with as many keys as
    queries.
    """
    found = []
    for queries, (first, last), left, right in blocks:
        square = last - (queries[1] - queries[0])
        begin = first
        if (left, right) == (-1, 0) and square > first:
            found.append(ScoreBlock(queries, (first, square)))
            begin = square
        found.append(ScoreBlock(queries, (begin, last), left, right))
    return tuple(found)


def _cut(queries: int, keys: int, left: int, right: int, diagonal: int) -> ScoreBlock | None:
    """The queries that see any key, the keys that any query sees, and the band between them.

    Query i sees the keys from `i + diagonal - left` to `i + diagonal + right`.
    """
    begin = max(0, -(diagonal + right)) if right >= 0 else 0
    end = min(queries, keys - diagonal + left) if left >= 0 else queries
    if begin >= end:
        return None
    first = max(0, begin + diagonal - left) if left >= 0 else 0
    last = min(keys, end + diagonal + right) if right >= 0 else keys
    # Count both limits from the diagonal that ends at the bottom right of the block.
    off = (diagonal + begin - first) - ((last - first) - (end - begin))
    left = left - off if left >= 0 else -1
    right = right + off if right >= 0 else -1
    if left >= last - first - 1:
        left = -1
    if right >= end - begin - 1:
        right = -1
    return ScoreBlock((begin, end), (first, last), left, right)


def _moved(block: ScoreBlock, queries: int, keys: int) -> ScoreBlock:
    (begin, end), (first, last), *band = block
    return ScoreBlock((begin + queries, end + queries), (first + keys, last + keys), *band)


def _joined_along_keys(blocks: list[ScoreBlock]) -> list[ScoreBlock]:
    """Full blocks with equal queries and neighbouring keys, joined."""
    joined: list[ScoreBlock] = []
    for block in blocks:
        for i, other in enumerate(joined):
            neighbours = block.queries == other.queries and block.keys[0] == other.keys[1]
            if block.full and other.full and neighbours:
                joined[i] = ScoreBlock(block.queries, (other.keys[0], block.keys[1]))
                break
        else:
            joined.append(block)
    return joined


def _joined_along_queries(blocks: list[ScoreBlock]) -> list[ScoreBlock]:
    """Full blocks with equal keys and neighbouring queries, joined."""
    swapped = [block._replace(queries=block.keys, keys=block.queries) for block in blocks]
    return [
        block._replace(queries=block.keys, keys=block.queries)
        for block in _joined_along_keys(swapped)
    ]
