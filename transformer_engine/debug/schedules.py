"""Questions about schedules (`nvdlfw_inspect._engine.Schedule`) over several iterations."""

from __future__ import annotations

from typing import Any

_NO_END = 2**63 - 1


def end_of_run(schedule: Any, iteration: int) -> int | None:
    """Return the first iteration after a due one that may not be due; None if all others are."""
    if schedule is None:
        return None
    if schedule.freq > 1:
        return iteration + 1
    end: int = next(end for start, end in schedule.intervals if start <= iteration <= end)
    return None if end >= _NO_END else end + 1
