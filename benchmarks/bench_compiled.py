"""Forward and backward under `torch.compile(fullgraph=True)`, over the same module in eager mode.

Times are those of a training loop, host and GPU: the host is what compiling is for. `in graphs` is
`mode="reduce-overhead"`, which replays CUDA graphs; without it the host decides below h 4096. Plain
torch, compiled, stands beside. The first cases are one layer, the last is the stack of bench_gpt,
compiled as a whole.
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
    """Traced as one graph, shapes fixed."""
    return torch.compile(module, fullgraph=True, dynamic=False, mode=mode)  # type: ignore[return-value]


def measure(
    report: Report, case: str, size: Size, layers: int, bar: float, precisions: tuple[str, ...]
) -> None:
    """Two rows for each precision."""
    x = random(size.batch, size.sequence, size.hidden)
    for name in precisions:
        torch._dynamo.reset()
        build = PlainLayer if name == "torch" else our_layer
        model = nn.Sequential(*(build(size) for _ in range(layers)))
        runs = {"eager": step(model, x, name)}
        runs["eager"]()  # makes the scales
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
