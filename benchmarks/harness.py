"""How every benchmark measures: cold caches, medians with percentiles, ratios within one run.

A benchmark is a script next to this file:

    from harness import Report, of_copy, require_gpu, time_gpu

    require_gpu()
    report = Report("softmax")
    report.row(op="softmax", case="4x32x2048x2048", bar=0.85, **of_copy(time_gpu(call), nbytes))
    report.save()

`PYTHONPATH=. python benchmarks/bench_softmax.py` prints the rows as they come and writes
`benchmarks/results/softmax.json`; the environment variable TE_BENCH_RESULTS names another folder.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from transformer_engine.pytorch.cuda_graphs.saved_scaling import capturing_graphs

Call = Callable[[], Any]

# Ten times the L2 of a Hopper GPU. Writing these bytes takes the GPU more than 100 us. Meanwhile,
# the host enqueues the timed call, so that no launch latency is measured.
FLUSH_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call over all repeats."""

    median_us: float
    p10_us: float
    p90_us: float
    min_us: float

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """Summary of two or more samples in microseconds."""
        deciles = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(statistics.median(samples), deciles[0], deciles[-1], min(samples))


def require_gpu() -> None:
    """End the script with a message if there is no GPU to measure."""
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: this benchmark measures a GPU")


def time_gpu_each(
    contenders: Mapping[str, Call],
    *,
    repeats: int = 50,
    warmup: int = 20,
    cold: bool = True,
    meet: Call | None = None,
) -> dict[str, Timing]:
    """GPU time of one call of each contender, interleaved so that all see the same clocks.

    Each round has a different random order, the same on all ranks. With a fixed order, a contender
    that always follows the one with the highest power would be measured at lower clocks.

    With `cold`, FLUSH_BYTES are written between calls, so that no input is still in L2. The first
    `warmup` rounds (allocator, autotuning, clocks) are not counted. `meet` is called before each
    call and not timed: GPUs that work together wait for each other there.
    """
    require_gpu()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda") if cold else None
    events: dict[str, list[list[torch.cuda.Event]]] = {name: [] for name in contenders}
    order, shuffler = list(contenders), random.Random(0)
    for _ in range(warmup + repeats):
        shuffler.shuffle(order)
        for name in order:
            if flush is not None:
                flush.zero_()
            if meet is not None:
                meet()
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            contenders[name]()
            pair[1].record()
            events[name].append(pair)
    torch.cuda.synchronize()
    return {
        name: Timing.of([start.elapsed_time(end) * 1e3 for start, end in pairs[warmup:]])
        for name, pairs in events.items()
    }


def time_gpu(call: Call, *, repeats: int = 50, warmup: int = 20, cold: bool = True) -> Timing:
    """GPU time of one call; see `time_gpu_each`."""
    return time_gpu_each({"": call}, repeats=repeats, warmup=warmup, cold=cold)[""]


@capturing_graphs()
def captured(call: Call, stream: torch.cuda.Stream | None = None, warmup: int = 3) -> Call:
    """Capture a call in a CUDA graph, and return the replay.

    `capturing_graphs` lets our attention choose its backend by GPU time only, as for graphs.

    Args:
        call: the call to capture.
        stream: the stream on which it is captured; a new one by default.
        warmup: number of calls before, which do allocations and lazy initialisation.
    """
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if stream is None else stream
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def time_graph(call: Call, *, repeats: int = 50, warmup: int = 20, cold: bool = True) -> Timing:
    """GPU time of a replay of the call, captured in a CUDA graph, so without host time."""
    require_gpu()
    return time_gpu(captured(call), repeats=repeats, warmup=warmup, cold=cold)


def peak_mib(step: Call) -> int:
    """Peak memory of a step in MiB, beyond what is allocated between steps."""
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return int((torch.cuda.max_memory_allocated() - before) / 2**20)


def time_host_each(
    contenders: Mapping[str, Call],
    *,
    loops: int = 100,
    calls: int = 10,
    warmup: int = 20,
    meet: Call | None = None,
) -> dict[str, Timing]:
    """Host time of one call of each contender; shapes must be tiny, so the host never waits.

    A loop times `calls` consecutive calls after a synchronisation, too few to fill the launch
    queue. Contenders take turns loop by loop; the garbage collector is off. `meet` is called before
    each loop and not timed.
    """
    return _time_loops(contenders, loops, calls, warmup, meet, waits=False)


def time_wall_each(
    contenders: Mapping[str, Call],
    *,
    loops: int = 10,
    calls: int = 10,
    warmup: int = 10,
    meet: Call | None = None,
) -> dict[str, Timing]:
    """Time of one call of each contender, host and GPU, as a training loop sees it.

    As `time_host_each`, but each loop waits for the GPU at its end.
    """
    return _time_loops(contenders, loops, calls, warmup, meet, waits=True)


def _time_loops(
    contenders: Mapping[str, Call],
    loops: int,
    calls: int,
    warmup: int,
    meet: Call | None,
    *,
    waits: bool,
) -> dict[str, Timing]:
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for call in contenders.values():
        for _ in range(warmup):
            call()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    gc.disable()
    for _ in range(loops):
        for name, call in contenders.items():
            if meet is not None:
                meet()
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            if waits:
                synchronize()
            samples[name].append((time.perf_counter() - start) * 1e6 / calls)
    synchronize()
    gc.enable()
    return {name: Timing.of(times) for name, times in samples.items()}


def time_host(call: Call, *, loops: int = 100, calls: int = 10, warmup: int = 20) -> Timing:
    """Host time of one call; see `time_host_each`."""
    return time_host_each({"": call}, loops=loops, calls=calls, warmup=warmup)[""]


@functools.cache
def copy_us(nbytes: int) -> float:
    """Time of a device copy that reads and writes `nbytes` in total, cold L2, in this run."""
    source = torch.ones(max(1, nbytes // 2), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return time_gpu(lambda: target.copy_(source)).median_us


def of_copy(timing: Timing, nbytes: int) -> dict[str, float]:
    """Row fields of a memory-bound kernel that must read and write `nbytes` in total."""
    copy = copy_us(nbytes)
    return {
        "us": round(timing.median_us, 2),
        "p10_us": round(timing.p10_us, 2),
        "p90_us": round(timing.p90_us, 2),
        "tb_per_s": round(nbytes / timing.median_us * 1e-6, 3),
        "copy_us": round(copy, 2),
        "ratio": round(copy / timing.median_us, 3),
    }


def over(timing: Timing, yardstick_us: float) -> dict[str, float]:
    """Row fields of a step: milliseconds, and the ratio to `yardstick_us`."""
    return {
        "ms": round(timing.median_us / 1e3, 4),
        "ratio": round(timing.median_us / yardstick_us, 3),
        "p10_us": round(timing.p10_us, 1),
        "p90_us": round(timing.p90_us, 1),
    }


def _commit() -> str:
    if commit := os.environ.get("TE_BENCH_COMMIT"):  # of a tree without its .git
        return commit
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    folder = Path(__file__).parent
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


class Report:
    """Rows of a benchmark, printed at once, and saved as JSON with GPU, versions and commit.

    Fields that `report.py` understands: `op`, `case`, `ratio` and `bar` (met when ratio >= bar,
    or ratio <= bar with `better="lower"`). All others are kept as they are.
    """

    def __init__(self, name: str, directory: str | Path | None = None) -> None:
        """`directory` falls back to TE_BENCH_RESULTS, then to `results/` next to this file."""
        default = os.environ.get("TE_BENCH_RESULTS", Path(__file__).parent / "results")
        self.path = Path(directory or default) / f"{name}.json"
        self.rows: list[dict[str, Any]] = []

    def row(self, **fields: Any) -> None:
        """Add a measurement, and print it."""
        self.rows.append(fields)
        print("  ".join(f"{name}={value}" for name, value in fields.items()), flush=True)

    def save(self) -> Path:
        """Writes the JSON file and returns its path."""
        document = {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "commit": _commit(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "rows": self.rows,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"wrote {self.path}", flush=True)
        return self.path
