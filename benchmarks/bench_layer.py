"""Whole layers: milliseconds of forward + backward, and peak memory, for ours and plain torch.

The bars are milliseconds on an H200, or MiB. In rows with a bar, `ratio` is the time or the memory
itself.
"""

from __future__ import annotations

from typing import Any

import contenders
import torch
from attention_cases import has_flash_attn_4, only
from contenders import PlainLayer, PlainMLP, Size, our_layer, our_mlp, random, step
from harness import Report, Timing, peak_mib, require_gpu, time_gpu_each

LARGE = Size(hidden=4096, ffn=16384, heads=32, sequence=4096, batch=4)
MEDIUM = Size(hidden=2048, ffn=8192, heads=16, sequence=2048, batch=4)
LONG = Size(hidden=8192, ffn=28672, heads=64, sequence=4096, batch=1)
# The best times of other libraries on this kind of GPU, in milliseconds.
PEERS = {
    LARGE: {"torch": 40.87, "bf16": 34.6, "fp8 delayed": 23.22, "fp8 current": 24.69},
    MEDIUM: {"torch": 5.44, "bf16": 4.84, "fp8 delayed": 3.68, "fp8 current": 4.00},
    LONG: {"torch": 32.31, "bf16": 29.37, "fp8 delayed": 18.77, "fp8 current": 19.82},
}
BY_CUDNN = "fp8 delayed, attention by cuDNN"
LAYER_BARS = {
    LARGE: {"bf16": 32.8, "fp8 delayed": 21.0},
    MEDIUM: {"bf16": 4.3, "fp8 delayed": 3.0},
    LONG: {"bf16": 28.0, "fp8 delayed": 17.2},
}
BEST_BACKEND_BARS = {"fp8 delayed": 20.6, BY_CUDNN: 21.0}  # bars of LARGE with flash-attn 4
MLP_TOKENS, MLP_HIDDEN, MLP_FFN = 8192, 4096, 16384
MLP_PEERS = {"bf16": 10.19, "fp8 delayed": 5.96, "fp8 current": 6.35}
GATED_PEERS = {"bf16": 15.09, "fp8 delayed": 8.85, "fp8 current": 9.29}
MEMORY_PEERS = {  # MiB
    "TransformerLayer": {"bf16": 2690, "fp8 delayed": 3210},
    "LayerNormMLP": {"bf16": 1920, "fp8 delayed": 2312},
}
MEMORY_BARS = {
    "TransformerLayer": {"bf16": 2690, "fp8 delayed": 2900, "fp8 current": 2900},
    "LayerNormMLP": {"bf16": 1920, "fp8 delayed": 2100, "fp8 current": 2100},
}


def report_times(
    report: Report,
    op: str,
    times: dict[str, Timing],
    peers: dict[str, float],
    bars: dict[str, float],
) -> None:
    """Add a row for each contender: milliseconds, also relative to plain torch."""
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
    bars, op = LAYER_BARS[size], f"TransformerLayer {size}"
    if has_flash_attn_4():
        op = f"{op}, flash-attn 4 installed"
        bars = bars | (BEST_BACKEND_BARS if size is LARGE else {})
        delayed = steps["fp8 delayed"]

        def by_cudnn() -> None:
            with only("cudnn"):
                delayed()

        steps[BY_CUDNN] = by_cudnn
    times = time_gpu_each(steps, repeats=20, warmup=5)
    report_times(report, op, times, PEERS[size], bars)


def measure_mlp(report: Report) -> None:
    x = random(MLP_TOKENS, MLP_HIDDEN)
    plain, ours = PlainMLP(MLP_HIDDEN, MLP_FFN), our_mlp(MLP_HIDDEN, MLP_FFN)
    steps = {"torch": step(plain, x, "torch")}
    steps |= {name: step(ours, x, name) for name in contenders.RECIPES}
    times = time_gpu_each(steps, repeats=20, warmup=5)
    op = f"LayerNormMLP gelu {MLP_TOKENS}x{MLP_HIDDEN} f{MLP_FFN}"
    report_times(report, op, times, MLP_PEERS, {"fp8 delayed": 5.6})

    gated = our_mlp(MLP_HIDDEN, MLP_FFN, activation="swiglu", normalization="RMSNorm")
    steps = {name: step(gated, x, name) for name in contenders.RECIPES}
    times = time_gpu_each(steps, repeats=20, warmup=5)
    op = op.replace("gelu", "swiglu RMSNorm")
    report_times(report, op, times, GATED_PEERS, {"fp8 delayed": 8.2})


def measure_memory(report: Report, size: Size) -> None:
    """Measure the peak memory of a step, beyond that of the module, its input and its state."""
    modules = {
        "TransformerLayer": (PlainLayer, our_layer, (size,)),
        "LayerNormMLP": (PlainMLP, our_mlp, (size.hidden, size.ffn)),
    }
    x = random(size.batch, size.sequence, size.hidden)
    for kind, (plain, ours, arguments) in modules.items():
        for name in ("torch", *contenders.RECIPES):
            module = (plain if name == "torch" else ours)(*arguments)
            # `peak_mib` counts from a state with gradients, which the step frees first.
            freed = sum([t.nbytes for t in (x, *module.parameters())]) / 2**20
            mib = peak_mib(step(module, x, name)) + int(freed)
            row: dict[str, Any] = {"op": f"peak memory {kind} {size}", "case": name, "mib": mib}
            if name in MEMORY_PEERS[kind]:
                row["peer_mib"] = MEMORY_PEERS[kind][name]
            if name in MEMORY_BARS[kind]:
                row.update(ratio=mib, bar=MEMORY_BARS[kind][name], better="lower")
            report.row(**row)
            del module
            torch.cuda.empty_cache()


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
