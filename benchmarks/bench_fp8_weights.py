"""Weights that are kept only in FP8: memory between steps, time of steps, and of optimizers.

Ratios are relative to the same layer with bf16 parameters, in bytes or in time.

Memory at rest is the number of bytes that tensors requested. The number of bytes that the caching
allocator counts as allocated also includes its rounding: if less than 1 MiB of a block is left
over, the whole block is allocated, which was 0.7 MiB of the 7 MiB of a small layer. Both kinds of
weights run once before, because workspaces that stay with a stream (20 MiB) would otherwise count
for the kind that runs first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import contenders
import torch
from contenders import Size, our_layer, random, step
from harness import Report, over, require_gpu, time_gpu_each
from torch import nn

import transformer_engine.pytorch as te

LARGE = Size(hidden=4096, ffn=16384, heads=32, sequence=4096, batch=4)
SHORT = Size(hidden=4096, ffn=16384, heads=32, sequence=512, batch=1)
SMALL = Size(hidden=768, ffn=3072, heads=12, sequence=1024, batch=8)
SIZES = (LARGE, SHORT, SMALL)
RECIPES = ("fp8 delayed", "fp8 current", "fp8 blocks")
LARGEST_SHARE = 0.56


def make(size: Size, fp8_weights: bool, recipe: str | None = None) -> nn.Module:
    with te.fp8_model_init(enabled=fp8_weights, recipe=contenders.RECIPES.get(recipe)):
        return our_layer(size)


def compare(
    report: Report, op: str, contestants: dict[str, Callable[[], None]], **more: Any
) -> None:
    """Add a row for each contestant; ratios are relative to the first one."""
    times = time_gpu_each(contestants, repeats=30, warmup=8)
    base = next(iter(times.values())).median_us
    for name, timing in times.items():
        row = {"op": op, "case": name, **over(timing, base)}
        report.row(**row, **(more if name != next(iter(times)) else {}))


def requested_bytes() -> int:
    """Bytes that the tensors on the GPU requested."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def measure_memory(report: Report, size: Size) -> None:
    """Measure requested bytes between steps, without gradients, and the peak of allocated bytes."""
    at_rest: dict[str, int] = {}
    peaks: dict[str, int] = {}
    x = random(size.batch, size.sequence, size.hidden)
    for fp8_weights in (False, True):
        step(make(size, fp8_weights), x, RECIPES[0])()
    for name, fp8_weights in (("bf16 weights", False), ("fp8 weights", True)):
        torch.cuda.empty_cache()
        allocated, requested = torch.cuda.memory_allocated(), requested_bytes()
        module = make(size, fp8_weights)
        run = step(module, x, RECIPES[0])
        run()
        for parameter in module.parameters():
            parameter.grad = None
        del run
        torch.cuda.synchronize()
        at_rest[name] = requested_bytes() - requested
        torch.cuda.reset_peak_memory_stats()
        step(module, x, RECIPES[0])()
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated() - allocated
        del module
    for op, found in (("memory at rest", at_rest), ("peak memory of a step", peaks)):
        for name, size_in_bytes in found.items():
            ratio = round(size_in_bytes / found["bf16 weights"], 3)
            row: dict[str, Any] = {"op": f"{op} {size}", "case": name, "ratio": ratio}
            row["mib"] = round(size_in_bytes / 2**20, 1)
            if op == "memory at rest" and name == "fp8 weights":
                row.update(bar=LARGEST_SHARE, better="lower")
            report.row(**row)


def measure_steps(report: Report, size: Size) -> None:
    x = random(size.batch, size.sequence, size.hidden)
    for recipe in RECIPES:
        steps = {
            "bf16 weights": step(make(size, False), x, recipe),
            "fp8 weights": step(make(size, True, recipe), x, recipe),
        }
        compare(report, f"{recipe} step {size}", steps, bar=1.0, better="lower")


def measure_optimizers(report: Report, size: Size) -> None:
    """Measure AdamW in place on bf16 and FP8 weights, and on fp32 masters of FP8 weights."""

    def in_place(fp8_weights: bool, **how: bool) -> Callable[[], None]:
        parameters = list(make(size, fp8_weights).parameters())
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        return torch.optim.AdamW(parameters, lr=1e-4, **how).step  # type: ignore[return-value]

    def on_masters() -> Callable[[], None]:
        parameters = list(make(size, True).parameters())
        masters = [nn.Parameter(p.detach().float()) for p in parameters]
        for master in masters:
            master.grad = torch.full_like(master, 1e-3)
        optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)

        def run() -> None:
            optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(parameters, masters, strict=True):
                    parameter.copy_(master)

        return run

    contestants = {
        "bf16 weights, fused": in_place(False, fused=True),
        "fp8 weights, fused": in_place(True, fused=True),
        "fp8 weights, foreach": in_place(True, foreach=True),
        "fp8 weights, fp32 masters": on_masters(),
    }
    compare(report, f"AdamW {size}", contestants)


def main() -> None:
    require_gpu()
    report = Report("fp8_weights")
    for size in SIZES:
        measure_memory(report, size)
        measure_steps(report, size)
    measure_optimizers(report, LARGE)
    report.save()


if __name__ == "__main__":
    main()
