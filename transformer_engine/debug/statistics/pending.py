"""`PendingCopy`: rows on their way to the host, and the statistics computed from them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from transformer_engine.debug.statistics.buffer import Slot
from transformer_engine.debug.statistics.differences import Row
from transformer_engine.debug.statistics.layout import Layout
from transformer_engine.debug.statistics.ranks import GroupRows
from transformer_engine.debug.statistics.rows import read
from transformer_engine.debug.statistics.subscription import Reading

SCALES = ("scale_inv_min", "scale_inv_max")  # can be read without the tensor in high precision


class Due(NamedTuple):
    """The statistics to read for one tensor, in the order of the configuration."""

    layer: str
    tensor: str
    readings: tuple[Reading, ...]


class Logged(NamedTuple):
    """Statistics of one tensor, ready for the logs; a value is None if the tensor was empty."""

    layer: str
    tensor: str
    values: Mapping[str, float | None]


class PendingCopy:
    """An asynchronous copy of the rows of one step to the host.

    Args:
        rows: `[slots, 16]`, or `[ranks, capacity, 16]` if gathered, on any device.
        iteration: the iteration that ended.
        due: the statistics to read from the rows.
        shared: for gathered rows, their group and layout.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        iteration: int,
        due: Sequence[Due],
        shared: tuple[GroupRows, Layout] | None = None,
    ) -> None:
        self.iteration = iteration
        self.due = due
        self.shared = shared
        self._event: torch.cuda.Event | None = None
        self._rows = rows
        self.nbytes = 0
        if rows.is_cuda:
            self.nbytes = rows.nbytes
            self._rows = torch.empty_like(rows, device="cpu", pin_memory=True)
            self._rows.copy_(rows, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(rows.device))

    def is_ready(self, wait: bool) -> bool:
        """Whether the copy has finished."""
        if self._event is None:
            return True
        if wait and self.shared is not None:
            self._wait_for_ranks(self.shared[0])
        elif wait:
            self._event.synchronize()
        return self._event.query()

    def _wait_for_ranks(self, group: GroupRows) -> None:
        """Wait; raise RuntimeError before NCCL's watchdog ends the process and names no rank."""
        assert self._event is not None
        started, longest = time.monotonic(), 0.8 * group.meeting.timeout.total_seconds()
        while not self._event.query():
            waited = time.monotonic() - started
            if waited > longest:
                doing = f"step() of iteration {self.iteration}"
                raise RuntimeError(group.meeting.failed(doing, waited, "it takes too long"))
            time.sleep(20e-6)

    def statistics(self, of_ranks: Mapping[int, Sequence[Row]] | None = None) -> Iterator[Logged]:
        """Yield the statistics of every tensor whose rows got values.

        Args:
            of_ranks: the rows that each rank has sent, if they are not the same on all.

        Raises:
            RanksDifferError: ranks have sent different rows, and `of_ranks` is not given.
        """
        rows, place, ranks = self._rows, None, 1
        if self.shared is not None:
            group, layout = self.shared
            place, ranks = layout.place, group.size
            if of_ranks:
                rows = group.merged_by_name(rows, layout, of_ranks)
            else:
                rows = group.merged(rows, layout)
        values = rows.tolist()
        for layer, tensor, readings in self.due:
            found = _values(readings, values, place, ranks)
            if found:
                yield Logged(layer, tensor, found)


def _values(
    readings: Sequence[Reading],
    rows: Sequence[Sequence[float]],
    place: Mapping[Slot, int] | None,
    ranks: int,
) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for slot, asks, numel, fed, scales_only in readings:
        row = rows[slot.position if place is None else place[slot]]
        values = read(slot.kind, row, numel * ranks) if row[0] else None
        for name, statistic in asks:
            if values is not None and (statistic in SCALES or not scales_only):
                found[name] = values[statistic]
            elif values is None and fed:
                found[name] = None
    return found
