"""Whole layers, forward + backward in milliseconds, and their memory, beside plain torch.

The bars are times on an H200; for rows with one, `ratio` is the time itself.
"""

from __future__ import annotations

from typing import Any

import contenders
import torch
from attention_cases import has_flash_attn_4, only
from contenders import PlainLayer, PlainMLP, Size, our_layer, our_mlp, random, step
from harness import Report, Timing, require_gpu, time_gpu_each

LARGE = Size(hidden=4096, ffn=16384, heads=32, sequence=4096, batch=4)
MEDIUM = Size(hidden=2048, ffn=8192, heads=16, sequence=2048, batch=4)
LONG = Size(hidden=8192, ffn=28672, heads=64, sequence=4096, batch=1)
# The best that others reach on this kind of GPU, in milliseconds.
PEERS = {
    LARGE: {"torch": 40.87, "bf16": 34.6, "fp8 delayed": 23.22, "fp8 current": 24.69},
    MEDIUM: {"torch": 5.44, "bf16": 4.84, "fp8 delayed": 3.68, "fp8 current": 4.00},
    LONG: {"torch": 32.31, "bf16": 29.37, "fp8 delayed": 18.77, "fp8 current": 19.82},
}
BY_CUDNN = "fp8 delayed, attention by cuDNN"
LAYER_BARS = {LARGE: {"bf16": 34.5, "fp8 delayed": 21.6}}
WITH_FLASH_ATTN_4 = {LARGE: {"bf16": 34.5, "fp8 delayed": 21.1, BY_CUDNN: 21.6}}
MLP_TOKENS, MLP_HIDDEN, MLP_FFN = 8192, 4096, 16384
MLP_PEERS = {"bf16": 10.19, "fp8 delayed": 5.96, "fp8 current": 6.35}
GATED_PEERS = {"bf16": 15.09, "fp8 delayed": 8.85, "fp8 current": 9.29}


def report_times(
    report: Report,
    op: str,
    times: dict[str, Timing],
    peers: dict[str, float],
    bars: dict[str, float],
) -> None:
    """One row per contender: milliseconds, and how much less than plain torch."""
    for name, timing in times.items():
        milliseconds = timing.median_us / 1e3
        row: dict[str, Any] = {"op": op, "case": name, "ms": round(milliseconds, 3)}
        row["p10_us"], row["p90_us"] = round(timing.p10_us), round(timing.p90_us)
        if "torch" in times:
            row["over_torch"] = round(timing.median_us / times["torch"].median_us, 3)
        if name in peers:
            row["peer_ms"] = peers[name]
        if name in bars:
            row.update(ratio=round(milliseconds, 3), bar=bars[name], better="lower")
        report.row(**row)


def measure_layer(report: Report, size: Size) -> None:
    x = random(size.batch, size.sequence, size.hidden)
    plain, ours = PlainLayer(size), our_layer(size)
    steps = {"torch": step(plain, x, "torch")}
    steps |= {name: step(ours, x, name) for name in contenders.RECIPES}
    bars, op = LAYER_BARS, f"TransformerLayer {size}"
    if has_flash_attn_4():
        bars, op = WITH_FLASH_ATTN_4, f"{op}, flash-attn 4 installed"
        delayed = steps["fp8 delayed"]

        def by_cudnn() -> None:
            with only("cudnn"):
                delayed()

        steps[BY_CUDNN] = by_cudnn
    times = time_gpu_each(steps, repeats=20, warmup=5)
    report_times(report, op, times, PEERS[size], bars.get(size, {}))


def measure_mlp(report: Report) -> None:
    x = random(MLP_TOKENS, MLP_HIDDEN)
    plain, ours = PlainMLP(MLP_HIDDEN, MLP_FFN), our_mlp(MLP_HIDDEN, MLP_FFN)
    steps = {"torch": step(plain, x, "torch")}
    steps |= {name: step(ours, x, name) for name in contenders.RECIPES}
    times = time_gpu_each(steps, repeats=20, warmup=5)
    op = f"LayerNormMLP gelu {MLP_TOKENS}x{MLP_HIDDEN} f{MLP_FFN}"
    report_times(report, op, times, MLP_PEERS, {"fp8 delayed": 5.65})

    gated = our_mlp(MLP_HIDDEN, MLP_FFN, activation="swiglu", normalization="RMSNorm")
    steps = {name: step(gated, x, name) for name in contenders.RECIPES}
    times = time_gpu_each(steps, repeats=20, warmup=5)
    report_times(report, op.replace("gelu", "swiglu RMSNorm"), times, GATED_PEERS, {})


def measure_memory(report: Report, size: Size) -> None:
    """Peak of two steps: parameters, gradients and activations, but not torch's own start-up."""
    peaks: dict[str, float] = {}
    x = random(size.batch, size.sequence, size.hidden)
    for name in ("torch", *contenders.RECIPES):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        module = PlainLayer(size) if name == "torch" else our_layer(size)
        run = step(module, x, name)
        run()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
        row: dict[str, Any] = {"op": f"peak memory {size}", "case": name, "mib": int(peaks[name])}
        if name.startswith("fp8"):
            row.update(ratio=round(peaks[name] / peaks["bf16"], 3), bar=1.0, better="lower")
        report.row(**row)
        del module, run


def main() -> None:
    require_gpu()
    report = Report("layer")
    for size in (LARGE, MEDIUM, LONG):
        measure_layer(report, size)
    measure_mlp(report)
    measure_memory(report, LARGE)
    report.save()


if __name__ == "__main__":
    main()
