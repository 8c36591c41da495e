"""Requests of features: a statistic, the row that it is read from, and a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from transformer_engine.debug.statistics.buffer import Asks, Slot
from transformer_engine.debug.statistics.rows import Kind


@dataclass(frozen=True)
class Source:
    """What one slot of a tensor measures.

    Attributes:
        kind: what the row holds.
        recipe: of casts: an empty string for the cast that the layer makes, else the recipe of a
            cast made for the statistics alone.
        columnwise: of casts: which of the two directions.
        block: of blocks: side of a block.
        dims: of blocks: 1 for runs of `block` elements, 2 for squares.
        both: of blocks: also look along the other axis, and take the larger value.
    """

    kind: Kind
    recipe: str = ""
    columnwise: bool = False
    block: int = 0
    dims: int = 1
    both: bool = False


MOMENTS = Source(Kind.MOMENTS)


class Subscription(NamedTuple):
    """One statistic of one tensor.

    Attributes:
        name: in the logs.
        source: of the slot that it is read from.
        statistic: its name among those of the slot, see `rows.read`.
        schedule: `nvdlfw_inspect._engine.Schedule`; None: always due.
    """

    name: str
    source: Source
    statistic: str
    schedule: Any = None


class Reading(NamedTuple):
    """What is read from a slot for the iteration that ends, and what it was fed with."""

    slot: Slot
    asks: Asks
    numel: int  # elements of a weight; zero for tensors that accumulate
    fed: bool
    scales_only: bool

    @classmethod
    def of(cls, slot: Slot) -> Reading:
        """Copy the state of a slot."""
        return cls(slot, slot.asks, slot.numel, slot.fed, slot.scales_only)
