"""Activation offloading: 12 layers h4096 in FP8; the first k are offloaded to host memory.

`copies` compares the copies of the tensors of one layer with a single cudaMemcpyAsync of as many
bytes to or from pinned memory. `step` is forward + backward; `copies_ms` is the time of all copies
of a step without any computing, one after the other.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from contenders import Size, our_layer, precision, random
from harness import Report, Timing, peak_mib, require_gpu, time_gpu, time_gpu_each
from torch import nn

from transformer_engine.pytorch.offload.offload import CudaCopies, Offload

SIZE = Size(hidden=4096, ffn=16384, heads=32, sequence=4096, batch=2)
LAYERS = 12
RATE_BAR, STEP_BAR = 0.9, 1.05
RECIPE = "fp8 delayed"


class Watched(CudaCopies):
    """Records the sizes of the tensors that it copies to the host, by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[list[int]] = []

    def out(self, sources: list[torch.Tensor]) -> tuple[list[torch.Tensor], object]:
        self.sizes.append([source.numel() for source in sources])
        return super().out(sources)


def step(layers: nn.ModuleList, x: torch.Tensor, offload: Offload | None) -> Callable[[], None]:
    upstream = torch.randn_like(x)
    x = x.detach().requires_grad_()
    leaves = [x, *layers.parameters()]

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        y = x
        with precision(RECIPE):
            for layer in layers:
                with nullcontext() if offload is None else offload:
                    y = layer(y)
                if offload is not None:
                    offload.synchronize()
        y.backward(upstream)

    return run


def timed(call: Callable[[], Any], repeats: int = 8) -> Timing:
    return time_gpu(call, repeats=repeats, warmup=3, cold=False)


def measure_copies(report: Report, sizes: list[int]) -> tuple[float, float]:
    """Measure the copies of a layer; returns microseconds to the host and back."""
    copies, total = CudaCopies(), sum(sizes)
    sources = [torch.ones(n, dtype=torch.uint8, device="cuda") for n in sizes]
    whole = torch.ones(total, dtype=torch.uint8, device="cuda")
    host = torch.ones(total, dtype=torch.uint8).pin_memory()

    def out() -> list[torch.Tensor]:
        hosts, event = copies.out(sources)
        copies.wait(event)
        return hosts

    hosts = out()

    def out_and_free() -> None:
        for one in out():
            copies.free(one)

    def back() -> None:
        copies.wait(copies.back(hosts, [s.device for s in sources])[1])

    found = []
    for op, plain, ours in (
        ("out", lambda: host.copy_(whole, non_blocking=True), out_and_free),
        ("back", lambda: whole.copy_(host, non_blocking=True), back),
    ):
        times = time_gpu_each({"memcpy": plain, "ours": ours}, repeats=8, warmup=3, cold=False)
        ratio = times["memcpy"].median_us / times["ours"].median_us
        report.row(
            op="copies",
            case=f"{op}, {len(sizes)} tensors, {total >> 20} MiB",
            us=round(times["ours"].median_us),
            gb_per_s=round(total / times["ours"].median_us * 1e-3, 1),
            ratio=round(ratio, 3),
            bar=RATE_BAR,
        )
        found.append(times["ours"].median_us)
    return found[0], found[1]


def main() -> None:
    require_gpu()
    report = Report("offload")
    layers = nn.ModuleList(our_layer(SIZE) for _ in range(LAYERS))
    x = random(SIZE.batch, SIZE.sequence, SIZE.hidden)
    copies = Watched()
    first = step(layers, x, Offload(1, LAYERS, True, False, copies))
    first()
    out_us, back_us = measure_copies(report, copies.sizes[0])
    plain_run = step(layers, x, None)
    plain = timed(plain_run).median_us
    report.row(op="step", case="none", ms=round(plain / 1e3, 2), peak_mib=peak_mib(plain_run))
    largest = 0
    for number in (1, 2, 3, 4, 5, 6, 8, 12):
        offload = Offload(number, LAYERS, True, False, CudaCopies())
        run = step(layers, x, offload)
        time = timed(run).median_us
        copied = min(number, LAYERS - 1) * (out_us + back_us)
        row = {"op": "step", "case": f"k={number}", "ms": round(time / 1e3, 2)}
        row |= {"copies_ms": round(copied / 1e3, 2), "peak_mib": peak_mib(run)}
        row |= {"over_plain": round(time / plain, 3)}
        report.row(**row, ratio=round(time / max(plain, copied), 3), bar=STEP_BAR, better="lower")
        if time <= STEP_BAR * plain:
            largest = number
        del run, offload
        gc.collect()
    report.row(op="largest k", case="costs <= 5 %", k=largest, of=LAYERS)
    report.save()


if __name__ == "__main__":
    main()
