"""Profiles a call: the time of each kernel, and the time in which no kernel runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Profile:
    """The kernels, copies and memsets of a call.

    Attributes:
        busy: share of the time, from the begin of the first to the end of the last of them, in
            which at least one ran.
        times: by name, the microseconds by which each lengthens a call. Time in which an earlier
            kernel still runs does not count, also if a kernel waits for the earlier one.
    """

    busy: float
    times: dict[str, float]


def profile_calls(call: Callable[[], Any], calls: int = 10) -> Profile:
    """Profile `calls` consecutive calls, after three warm-up calls."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    events = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    events.sort()
    busy, first = 0.0, events[0][0]
    reached = first
    times: Counter[str] = Counter()
    for start, end, name in events:
        added = max(0.0, end - max(start, reached))
        reached = max(reached, end)
        busy += added
        times[name] += added / calls
    return Profile(busy / (reached - first), dict(times))
