"""The cost of the debugger: FP8 steps of four layers in debug sessions, relative to plain steps.

A new session begins for every block of steps, so that all kinds of sessions take turns within one
run; the first steps of a block are not timed. A step is forward, backward and `debug_api.step()`.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from contenders import Size, our_layer, random, step
from harness import Report, require_gpu
from torch import nn

import nvdlfw_inspect.api as debug_api

LAYERS, STEPS, WARMUP, ROUNDS = 4, 10, 3, 9
LARGE = Size(hidden=4096, ffn=16384, heads=32, sequence=4096, batch=4)
SMALL = Size(hidden=4096, ffn=16384, heads=32, sequence=2048, batch=2)
ALL = ["min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range"]
OPERANDS = ["activation", "weight", "gradient"]
Config = dict[str, Any]


def everywhere(feature: str, **body: Any) -> Config:
    """A configuration with one feature on all layers."""
    section = {"enabled": True, "layers": {"layer_types": ["all"]}}
    return {"all": {**section, "transformer_engine": {feature: {"enabled": True, **body}}}}


ELSEWHERE: Config = {
    "none": {
        "enabled": True,
        "layers": {"layer_types": ["a layer that is not there"]},
        "transformer_engine": {
            "LogTensorStats": {"enabled": True, "tensors": OPERANDS, "stats": ALL}
        },
    }
}
SESSIONS: dict[str, Config | None] = {
    "plain": None,
    "nothing selected": ELSEWHERE,
    "all statistics, every step": everywhere("LogTensorStats", tensors=OPERANDS, stats=ALL),
    "all statistics, freq 10": everywhere("LogTensorStats", tensors=OPERANDS, stats=ALL, freq=10),
    "underflows%, every step": everywhere(
        "LogFp8TensorStats", tensors=OPERANDS, stats=["underflows%"]
    ),
}
BARS = {
    LARGE: {"nothing selected": 1.01, "all statistics, every step": 1.03},
    SMALL: {"nothing selected": 1.01, "all statistics, every step": 1.05},
}
for bars in BARS.values():
    bars |= {"all statistics, freq 10": 1.005, "underflows%, every step": 1.05}


def block_ms(run: Callable[[], None], config: Config | None, folder: str) -> float:
    """Milliseconds of a step: the mean of `STEPS` consecutive steps in one session."""
    if config is not None:
        debug_api.initialize(config_file=config, log_dir=folder)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for index in range(WARMUP + STEPS):
        if index == WARMUP:
            torch.cuda.synchronize()
            start.record()
        run()
        if config is not None:
            debug_api.step()
    end.record()
    torch.cuda.synchronize()
    if config is not None:
        debug_api.end_debug()
    return start.elapsed_time(end) / STEPS


def measure(report: Report, size: Size) -> None:
    """Add a row for each kind of session."""
    model = nn.Sequential(*(our_layer(size) for _ in range(LAYERS)))
    run = step(model, random(size.batch, size.sequence, size.hidden), "fp8 delayed")
    times: dict[str, list[float]] = {name: [] for name in SESSIONS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(ROUNDS + 1):
            for name, config in SESSIONS.items():
                taken = block_ms(run, config, folder)
                if turn:  # the first round warms up
                    times[name].append(taken)
    for name, taken in times.items():
        ratios = [t / plain for t, plain in zip(taken, times["plain"], strict=True)]
        row: dict[str, Any] = {"op": f"{LAYERS} layers {size}", "case": name}
        row["ms"] = round(statistics.median(taken), 3)
        row["ratio"] = round(statistics.median(ratios), 4)
        row["least"], row["most"] = round(min(ratios), 4), round(max(ratios), 4)
        if name in BARS[size]:
            row.update(bar=BARS[size][name], better="lower")
        report.row(**row)


def main() -> None:
    require_gpu()
    report = Report("inspect")
    for size in (LARGE, SMALL):
        measure(report, size)
    report.save()


if __name__ == "__main__":
    main()
