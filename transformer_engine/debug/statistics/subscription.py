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
        recipe: for casts: "" for the cast that the layer makes, else the recipe of a cast that is
            made only for statistics.
        columnwise: for casts: whether it is the column-wise cast or the row-wise one.
        block: for blocks: number of elements along the side of a block.
        dims: for blocks: 1 for `block` consecutive elements, 2 for squares.
        both: for blocks: whether blocks along columns count, too; the larger value is taken.
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
        name: name of the statistic in the logs.
        source: source of the slot from which the statistic is read.
        statistic: name of the statistic in the result of `rows.read`.
        schedule: `nvdlfw_inspect._engine.Schedule`; None: always due.
    """

    name: str
    source: Source
    statistic: str
    schedule: Any = None


class Reading(NamedTuple):
    """The statistics to read from a slot for the iteration that ends, and the state of the slot."""

    slot: Slot
    asks: Asks
    numel: int  # elements of a weight; 0 for other tensors, whose rows accumulate
    fed: bool
    scales_only: bool

    @classmethod
    def of(cls, slot: Slot) -> Reading:
        """Copy the state of a slot."""
        return cls(slot, slot.asks, slot.numel, slot.fed, slot.scales_only)
