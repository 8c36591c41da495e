"""A long FP8 training with the debugger and changing shapes: memory, step time and results.

Two models take the same steps. One runs with recordings, and with all statistics of the debugger in
every tenth step; the other one runs with neither. Their losses and parameters must stay bitwise
equal. Memory and step time of the first model must not grow: the last fifth of the time is compared
with the fifth after a warm-up, which takes a tenth of the time.

    python tools/soak hour --device cuda --seconds 3600
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from determinism import without_recordings
from outcome import Outcome, until

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.optimizers import FusedAdam

_SHAPES = [(tokens, batch) for tokens in (64, 128, 192, 256, 320) for batch in (1, 2, 4)]
_SHAPES += [(77, 1), (130, 3)]  # tokens that FP8 pads
_LAYERS = 2
_SIZES = {"cuda": (1024, 4096, 16), "cpu": (32, 64, 2)}
_FLAT = 1.01  # largest growth of step time in an hour on a GPU
_FLAT_FOR_MINUTES = {"cuda": 1.05, "cpu": 1.25}  # for shorter runs, of fewer steps
_MEMORY_FLAT = 1.01
_LEAST = 60.0  # seconds; shorter runs are not judged
_LONG = 1800.0  # seconds
_LOOK = 50  # steps between two checks of memory and losses, which wait for the GPU
_KIB = 1024
_INSPECTED = {
    "hour": {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": "recorded.*"},
        "transformer_engine": {
            "LogTensorStats": {
                "enabled": True,
                "tensors": ["activation", "gradient", "weight"],
                "stats": ["min", "max", "mean", "std", "l1_norm", "l2_norm", "dynamic_range"],
                "freq": 10,
            },
            "LogFp8TensorStats": {
                "enabled": True,
                "tensors": ["activation", "gradient", "weight"],
                "stats": ["underflows%", "overflows%"],
                "freq": 10,
            },
        },
    }
}


@dataclass
class Trace:
    """The measurements, each with its time: seconds of steps by shape, and memory."""

    steps: dict[tuple[int, int], list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    memory: list[tuple[float, dict[str, int]]] = field(default_factory=list)


class Model:
    """Layers with an optimizer; equal seeds give equal models."""

    def __init__(self, name: str, seed: int, device: str) -> None:
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(
                *_SIZES[device],
                hidden_dropout=0.0,
                attention_dropout=0.0,
                params_dtype=torch.bfloat16,
                device=device,
                name=f"{name}.{number}",
            )
            for number in range(_LAYERS)
        )
        self.optimizer = FusedAdam(self.layers.parameters(), lr=1e-4)
        self.recipe = DelayedScaling(amax_history_len=16)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """Train one step towards the input shifted by one token; returns the loss."""
        y = x
        with te.fp8_autocast(fp8_recipe=self.recipe):
            for layer in self.layers:
                y = layer(y)
        loss = (y.float() - x.float().roll(1, 0)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def run(seconds: float, seed: int, device: str = "cpu") -> Outcome:
    """Train for this time, and judge the measurements."""
    found = Outcome("hour" if device == "cpu" else "hour_cuda")
    trace = Trace()
    if device == "cpu":
        torch.set_num_threads(1)  # such small layers are not faster with more
    with tempfile.TemporaryDirectory() as folder:
        debug_api.initialize(_INSPECTED, log_dir=folder)
        try:
            _train(seconds, seed, device, trace, found)
            rows = (Path(folder) / "statistics_rank-0.jsonl").read_text().count("\n")
        finally:
            debug_api.end_debug()
    found.count("rows of statistics", rows)
    if seconds >= _LEAST:
        _judge(trace, device, found)
    return found


def _train(seconds: float, seed: int, device: str, trace: Trace, found: Outcome) -> None:
    recorded, plain = Model("recorded", seed, device), Model("plain", seed, device)
    draw, random_values = random.Random(seed), torch.Generator(device).manual_seed(seed)
    losses: list[tuple[torch.Tensor, torch.Tensor]] = []
    began = time.monotonic()
    for number in until(seconds, least=_LOOK):
        shape = _SHAPES[number] if number < len(_SHAPES) else draw.choice(_SHAPES)
        x = torch.randn(
            *(*shape, _SIZES[device][0]),
            generator=random_values,
            device=device,
            dtype=torch.bfloat16,
        )
        _wait(device)
        start = time.perf_counter()
        ours = recorded.step(x)
        debug_api.step()
        _wait(device)
        now = time.monotonic() - began
        trace.steps[shape].append((now, time.perf_counter() - start))
        with without_recordings():
            losses.append((ours, plain.step(x)))
        found.count("steps")
        if number % _LOOK == _LOOK - 1:
            trace.memory.append((now, _memory(device)))
            if not all(torch.equal(*pair) and pair[0].isfinite() for pair in losses):
                found.failures.append(f"losses differ before step {number + 1}")
                return
            losses.clear()
    pairs = zip(recorded.layers.parameters(), plain.layers.parameters(), strict=True)
    if not all(torch.equal(*pair) for pair in pairs):
        found.failures.append("parameters differ at the end")


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _memory(device: str) -> dict[str, int]:
    """KiB of memory of the process, of tensors on the GPU, and of the caching allocator."""
    gc.collect()  # dropped recordings are reference cycles
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {"of the process": pages * os.sysconf("SC_PAGE_SIZE") // _KIB}
    if device == "cuda":
        found["of tensors"] = torch.cuda.memory_allocated() // _KIB
        found["of the GPU"] = torch.cuda.memory_reserved() // _KIB
    return found


def _judge(trace: Trace, device: str, found: Outcome) -> None:
    """Compare the last fifth of the time with the fifth after the first tenth, a warm-up."""
    end = trace.memory[-1][0] if trace.memory else 0.0

    def parts(values: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
        early = [value for when, value in values if 0.1 * end < when <= 0.3 * end]
        return early, [value for when, value in values if when > 0.8 * end]

    ratios = []
    for values in trace.steps.values():
        early, late = parts(values)
        if early and late:
            ratios.append(statistics.median(late) / statistics.median(early))
    if ratios:
        ratio = statistics.geometric_mean(ratios)
        found.most("times the first steps' time, the last ones'", ratio)
        if ratio > (_FLAT if device == "cuda" and end > _LONG else _FLAT_FOR_MINUTES[device]):
            found.failures.append(f"steps take {ratio:.3f} times as long in the end")
    for kind in trace.memory[-1][1] if trace.memory else ():
        early, late = parts([(when, sizes[kind]) for when, sizes in trace.memory])
        if not early or not late:
            continue
        ratio = max(late) / max(early)
        found.most(f"times the first memory {kind}, the last", ratio)
        if ratio > _MEMORY_FLAT:
            found.failures.append(f"memory {kind} grows from {max(early)} to {max(late)} KiB")
