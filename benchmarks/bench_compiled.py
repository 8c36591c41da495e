"""Forward and backward under `torch.compile(fullgraph=True)`, relative to eager mode.

Times are wall times of a training loop, host and GPU, because compiling saves host time.
`in graphs` is `mode="reduce-overhead"`, which replays CUDA graphs. Without graphs, layers with a
hidden size below 4096 are host-bound. Layers of plain torch are compiled for comparison. The first
cases are one layer; the last one is the stack of bench_gpt, compiled as a whole.
"""

from __future__ import annotations

import time

import torch
from bench_gpt import LAYERS, SIZE
from contenders import PlainLayer, Size, our_layer, random, step
from harness import Report, over, require_gpu, time_wall_each
from torch import nn

WAYS = {"compiled": None, "compiled in graphs": "reduce-overhead"}
CASES = (  # name, size, layers, bar, precisions
    (
        "h1024",
        Size(1024, 4096, 16, 1024, 8),
        1,
        1.15,
        ("torch", "bf16", "fp8 delayed", "fp8 current"),
    ),
    ("h4096", Size(4096, 16384, 32, 2048, 2), 1, 1.0, ("torch", "bf16", "fp8 delayed")),
    (f"GPT, {LAYERS} layers", SIZE, LAYERS, 1.0, ("bf16", "fp8 delayed")),
)


def compiled(module: nn.Module, mode: str | None) -> nn.Module:
    """The module, compiled as one graph with fixed shapes."""
    return torch.compile(module, fullgraph=True, dynamic=False, mode=mode)  # type: ignore[return-value]


def measure(
    report: Report, case: str, size: Size, layers: int, bar: float, precisions: tuple[str, ...]
) -> None:
    """Add two rows to the report for each precision: compiled, and compiled in graphs."""
    x = random(size.batch, size.sequence, size.hidden)
    for name in precisions:
        torch._dynamo.reset()
        build = PlainLayer if name == "torch" else our_layer
        model = nn.Sequential(*(build(size) for _ in range(layers)))
        runs = {"eager": step(model, x, name)}
        runs["eager"]()  # creates the FP8 scales
        for way, mode in WAYS.items():
            runs[way] = step(compiled(model, mode), x, name)
        began = time.perf_counter()
        runs["compiled"]()
        torch.cuda.synchronize()
        seconds = round(time.perf_counter() - began, 1)
        times = time_wall_each(runs)
        judged = {} if name == "torch" else {"bar": bar, "better": "lower"}
        for way in WAYS:
            row = over(times[way], times["eager"].median_us)
            report.row(op=f"{way}, {name}", case=f"{case} {size}", **row, seconds=seconds, **judged)
        report.save()


def main() -> None:
    require_gpu()
    report = Report("compiled")
    for case in CASES:
        measure(report, *case)


if __name__ == "__main__":
    main()
