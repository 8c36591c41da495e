"""What a GPU does in a call: its kernels, how long each takes, and when none runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Profile:
    """Kernels, copies and clears of a call.

    Attributes:
        busy: share of the time between the first and the last in which any ran.
        times: microseconds by which each lengthens a call, by name: what ran beside the one before
            does not count, nor does a kernel that waits for that one to end.
    """

    busy: float
    times: dict[str, float]


def profile_calls(call: Callable[[], Any], calls: int = 10) -> Profile:
    """Profile of so many calls in a row, after three that are not counted."""
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
