"""`Counter`: counts events, such as GEMMs and collectives, for reports.

A recording knows the events of one call beforehand. It adds all of them at once, as a
`CountedGroup`, each time it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from typing import Any


class _Apart(threading.local):
    counts: dict[Any, int] | None = None  # of `Counter.apart`; None outside of it


class CountedGroup:
    """The events of one call of a recording: keys with their counts. `times` counts the calls."""

    __slots__ = ("_apart", "counts", "times")

    def __init__(self, counts: Mapping[Any, int], apart: _Apart) -> None:
        self.counts, self.times = counts, 0
        self._apart = apart

    def add(self) -> None:
        """Count one more call, unless this thread is inside `Counter.apart`."""
        if self._apart.counts is None:
            self.times += 1


class Counter:
    """Counts of keys. All threads count together, unless they are inside `apart`.

    Threads add to `times` of an object only: Python does not switch threads within `+= 1` of an
    attribute, but between reading and writing an element of a dict.
    """

    def __init__(self) -> None:
        self._keys: dict[Any, CountedGroup] = {}
        self._groups: dict[frozenset[tuple[Any, int]], CountedGroup] = {}
        self._apart = _Apart()

    def add(self, key: Hashable) -> None:
        """Count a key once."""
        counts = self._apart.counts
        if counts is not None:
            counts[key] = counts.get(key, 0) + 1
            return
        found = self._keys.get(key)
        if found is None:
            found = self._keys.setdefault(key, CountedGroup({key: 1}, self._apart))
        found.times += 1

    def group(self, counts: Mapping[Any, int]) -> CountedGroup:
        """The group with these counts of keys; the same object for equal counts."""
        key = frozenset(counts.items())
        return self._groups.setdefault(key, CountedGroup(counts, self._apart))

    def apart(self) -> CountingApart:
        """A context in which this thread counts in the dict that it yields, and nowhere else."""
        return CountingApart(self._apart)

    def totals(self, reset: bool = False) -> dict[Any, int]:
        """All counts; with `reset` they start anew."""
        totals: dict[Any, int] = {}
        # New lists, because other threads may add groups.
        for group in [*self._keys.values(), *self._groups.values()]:
            for key, number in group.counts.items() if group.times else ():
                totals[key] = totals.get(key, 0) + number * group.times
        if reset:
            self.reset()
        return totals

    def reset(self) -> None:
        """Start counting anew."""
        self._keys.clear()
        for group in list(self._groups.values()):
            group.times = 0


class CountingApart:
    """The context of `Counter.apart`.

    A class, because every operator of compiled code enters one: a generator takes 1 us longer.
    """

    def __init__(self, apart: _Apart) -> None:
        self._apart = apart

    def __enter__(self) -> dict[Any, int]:
        counts: dict[Any, int] = {}
        self._outer, self._apart.counts = self._apart.counts, counts
        return counts

    def __exit__(self, *_: object) -> None:
        self._apart.counts = self._outer
