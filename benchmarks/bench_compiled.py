"""Forward and backward under `torch.compile(fullgraph=True)`, over the same module in eager mode.

Plain torch, compiled, stands beside. The first case is the stack of bench_gpt; its 12 layers are
compiled as a whole.
"""

from __future__ import annotations

import time

import torch
from bench_gpt import LAYERS, SIZE
from contenders import PlainLayer, Size, our_layer, random, step
from harness import Report, over, require_gpu, time_gpu_each
from torch import nn

BAR = 1.0
CASES = {
    "h1024": (Size(1024, 4096, 16, 1024, 8), ("bf16", "fp8 delayed", "fp8 current")),
    "h4096": (Size(4096, 16384, 32, 2048, 2), ("bf16", "fp8 delayed")),
}


def compiled(module: nn.Module) -> nn.Module:
    """Traced as one graph, shapes fixed."""
    return torch.compile(module, fullgraph=True, dynamic=False)  # type: ignore[return-value]


def measure(
    report: Report, case: str, size: Size, layers: int, precisions: tuple[str, ...]
) -> None:
    """One row for each precision, and one for plain torch."""
    x = random(size.batch, size.sequence, size.hidden)
    for name in ("torch", *precisions):
        torch._dynamo.reset()
        build = PlainLayer if name == "torch" else our_layer
        model = nn.Sequential(*(build(size) for _ in range(layers)))
        runs = {"eager": step(model, x, name), "compiled": step(compiled(model), x, name)}
        began = time.perf_counter()
        runs["compiled"]()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        times = time_gpu_each(runs, repeats=30, warmup=10)
        row = over(times["compiled"], times["eager"].median_us)
        bar = {} if name == "torch" else {"bar": BAR, "better": "lower"}
        seconds = round(seconds, 1)
        report.row(op=f"compiled {name}", case=f"{case} {size}", **row, seconds=seconds, **bar)
        report.save()


def main() -> None:
    require_gpu()
    report = Report("compiled")
    for case, (size, precisions) in CASES.items():
        measure(report, case, size, 1, precisions)
    measure(report, f"GPT, {LAYERS} layers", SIZE, LAYERS, ("bf16", "fp8 delayed"))


if __name__ == "__main__":
    main()
