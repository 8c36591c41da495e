"""Which queries see which keys, where both are chunks of a sequence: cut into parts.

A part is a range of queries and one of keys, side by side in memory, under a band mask whose
diagonal ends bottom-right. Query i of n sees key j of m where no limit hides it (-1 is none):

    i + m - n - left <= j <= i + m - n + right

Rank 1 of 2 has chunks 1 and 2. With a causal mask its queries meet the keys of rank 0, chunks 0 and
3, in one part: both see all of chunk 0, and none sees chunk 3.
"""

from __future__ import annotations

from typing import NamedTuple

from transformer_engine.pytorch.capture import memoize

Range = tuple[int, int]


class Side(NamedTuple):
    """Chunks of a sequence, one after the other in memory.

    Attributes:
        chunks: numbers of the chunks in the order of memory.
        length: tokens of a chunk.
    """

    chunks: tuple[int, ...]
    length: int

    @property
    def tokens(self) -> int:
        """Of all chunks."""
        return len(self.chunks) * self.length

    def stretches(self, range: Range) -> list[Range]:
        """First token in the sequence and count of tokens, of what neighbours in both."""
        found: list[Range] = []
        for place, chunk in enumerate(self.chunks):
            begin = max(range[0], place * self.length)
            end = min(range[1], (place + 1) * self.length)
            first = chunk * self.length + begin - place * self.length
            if begin >= end:
                continue
            if found and sum(found[-1]) == first:
                found[-1] = (found[-1][0], found[-1][1] + end - begin)
            else:
                found.append((first, end - begin))
        return found


def side_of_rank(rank: int, ranks: int, length: int) -> Side:
    """What a rank has."""
    return Side((rank, 2 * ranks - 1 - rank), length)


def whole_side(ranks: int, length: int) -> Side:
    """What all ranks have together."""
    return Side(tuple(range(2 * ranks)), length)


class Piece(NamedTuple):
    """A part; ranges are of tokens in memory, limits as above."""

    queries: Range
    keys: Range
    left: int = -1
    right: int = -1

    @property
    def ranges(self) -> tuple[Range, Range]:
        """Both."""
        return self.queries, self.keys

    @property
    def full(self) -> bool:
        """Every query sees every key."""
        return self.left < 0 and self.right < 0


@memoize
def pieces(left: int, right: int, shift: int, queries: Side, keys: Side) -> tuple[Piece, ...]:
    """The parts in which queries see keys, each pair of them in one.

    Args:
        left: query i of the sequence sees keys from `i + shift - left` on; -1 is no limit.
        right: up to `i + shift + right`.
        shift: the key on the diagonal of query 0.
        queries: of one rank.
        keys: of the same or another rank, or of all.
    """
    if queries == keys and shift == 0 and (left, right) == (-1, 0):
        whole = (0, queries.tokens)
        return (Piece(whole, whole, -1, 0),)  # chunks rise in memory, too
    found = []
    query_place = 0
    for query_first, query_count in queries.stretches((0, queries.tokens)):
        key_place = 0
        for key_first, key_count in keys.stretches((0, keys.tokens)):
            diagonal = query_first + shift - key_first
            piece = _cut(query_count, key_count, left, right, diagonal)
            if piece is not None:
                found.append(_moved(piece, query_place, key_place))
            key_place += key_count
        query_place += query_count
    return tuple(_joined(_joined(found, 1), 0))


def _cut(queries: int, keys: int, left: int, right: int, diagonal: int) -> Piece | None:
    """The queries that see any key, the keys that any query sees, and the band between them.

    Query i sees the keys from `i + diagonal - left` to `i + diagonal + right`.
    """
    begin = max(0, -(diagonal + right)) if right >= 0 else 0
    end = min(queries, keys - diagonal + left) if left >= 0 else queries
    if begin >= end:
        return None
    first = max(0, begin + diagonal - left) if left >= 0 else 0
    last = min(keys, end + diagonal + right) if right >= 0 else keys
    # The band in terms of the part, whose diagonal ends bottom-right.
    off = (diagonal + begin - first) - ((last - first) - (end - begin))
    left = left - off if left >= 0 else -1
    right = right + off if right >= 0 else -1
    if left >= last - first - 1:
        left = -1
    if right >= end - begin - 1:
        right = -1
    return Piece((begin, end), (first, last), left, right)


def _moved(piece: Piece, queries: int, keys: int) -> Piece:
    (begin, end), (first, last), *band = piece
    return Piece((begin + queries, end + queries), (first + keys, last + keys), *band)


def _joined(found: list[Piece], side: int) -> list[Piece]:
    """Parts in which all is seen, joined where they are neighbours on one side."""
    joined: list[Piece] = []
    for piece in found:
        for i, other in enumerate(joined):
            here, there = (one.ranges[side] for one in (piece, other))
            equal = piece.ranges[1 - side] == other.ranges[1 - side]
            if piece.full and other.full and equal and there[1] == here[0]:
                range = (there[0], here[1])
                joined[i] = Piece(piece.queries, range) if side else Piece(range, piece.keys)
                break
        else:
            joined.append(piece)
    return joined
