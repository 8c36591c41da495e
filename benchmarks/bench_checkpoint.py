"""Activation checkpointing: training steps of four layers, with each layer checkpointed, or none.

`ratio` is the time divided by that without checkpoints. As the forward is a third of forward and
backward, a ratio of 4/3 is expected.
"""

from __future__ import annotations

from collections.abc import Callable

import contenders
import torch
from contenders import Size, our_layer, precision, random
from harness import Report, over, peak_mib, require_gpu, time_gpu_each
from torch import nn

import transformer_engine.pytorch as te

LAYERS = 4
SIZES = (
    Size(hidden=4096, ffn=16384, heads=32, sequence=4096, batch=2),
    Size(hidden=2048, ffn=8192, heads=16, sequence=2048, batch=4),
)
BAR = 1.34
MODES = {"none": None, "reentrant": True, "not reentrant": False}


def step(
    layers: nn.ModuleList, x: torch.Tensor, name: str, reentrant: bool | None
) -> Callable[[], None]:
    x = x.detach().requires_grad_()
    upstream = torch.randn_like(x)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-5, fused=True)

    def run() -> None:
        x.grad = None
        optimizer.zero_grad(set_to_none=True)
        y = x
        with precision(name):
            for layer in layers:
                y = (
                    layer(y)
                    if reentrant is None
                    else te.checkpoint(layer, y, use_reentrant=reentrant)
                )
        y.backward(upstream)
        optimizer.step()

    return run


def measure(report: Report, size: Size, judge: bool) -> None:
    layers = nn.ModuleList(our_layer(size) for _ in range(LAYERS))
    x = random(size.batch, size.sequence, size.hidden)
    for name in contenders.RECIPES:
        steps = {mode: step(layers, x, name, how) for mode, how in MODES.items()}
        peaks = {mode: peak_mib(run) for mode, run in steps.items()}
        times = time_gpu_each(steps, repeats=20, warmup=5, cold=False)
        for mode, timing in times.items():
            row = {"op": f"{LAYERS} layers {size}", "case": f"{name}, {mode}"}
            row |= {"peak_mib": peaks[mode], **over(timing, times["none"].median_us)}
            if judge and mode != "none":
                row.update(bar=BAR, better="lower")
            report.row(**row)


def main() -> None:
    require_gpu()
    report = Report("checkpoint")
    measure(report, SIZES[0], judge=True)
    measure(report, SIZES[1], judge=False)
    report.save()


if __name__ == "__main__":
    main()
