"""Host time of calls on tiny shapes, relative to the same calls in plain torch in the same run.

`fp8_autocast` is entered outside of the timed loops, except in `enter` rows, which enter and leave
it in each call.
"""

from __future__ import annotations

from collections.abc import Callable

import contenders
import torch
from contenders import (
    DEVICE,
    DTYPE,
    FACTORY,
    PlainLayer,
    PlainMLP,
    Size,
    our_layer,
    our_mlp,
    precision,
    random,
)
from harness import Report, require_gpu, time_host_each
from torch import nn

import transformer_engine.pytorch as te

SIZE = Size(hidden=256, ffn=1024, heads=4, sequence=256, batch=1)
FEATURES = SIZE.hidden
Call = Callable[[], object]


def forward(module: nn.Module, x: torch.Tensor, **arguments: bool) -> Call:
    return lambda: module(x, **arguments)


def forward_backward(module: nn.Module, x: torch.Tensor) -> Call:
    leaves = [x, *module.parameters()]
    upstream = torch.randn_like(x)

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        module(x).backward(upstream)

    return run


def compare(
    report: Report, op: str, calls: dict[str, Call], recipe: str, bars: dict[str, float]
) -> None:
    """Time `calls` in the autocast of a recipe; ratios are relative to the first call."""
    with precision(recipe):
        times = time_host_each(calls)
    yardstick = next(iter(times.values())).median_us
    for name, timing in times.items():
        row = {"op": op, "case": name, "us": round(timing.median_us, 2)}
        row["ratio"] = round(timing.median_us / yardstick, 3)
        row["p10_us"], row["p90_us"] = round(timing.p10_us, 2), round(timing.p90_us, 2)
        if name in bars:
            row.update(bar=bars[name], better="lower")
        report.row(**row)


def entered(call: Call, recipe: str) -> Call:
    def run() -> None:
        with precision(recipe):
            call()

    return run


def measure_linear(report: Report) -> None:
    x = random(FEATURES, FEATURES).requires_grad_()
    plain = nn.Linear(FEATURES, FEATURES, **FACTORY)
    ours = te.Linear(FEATURES, FEATURES, params_dtype=DTYPE, device=DEVICE)
    op = "Linear forward"
    compare(
        report, op, {"torch": forward(plain, x), "bf16": forward(ours, x)}, "bf16", {"bf16": 1.15}
    )
    for recipe in ("fp8 delayed", "fp8 current"):
        with precision(recipe):
            ours(x, is_first_microbatch=True)
        calls = {
            "torch": forward(plain, x),
            f"{recipe} cached": forward(ours, x, is_first_microbatch=False),
            f"{recipe} casting": forward(ours, x),
        }
        bars = {f"{recipe} cached": 1.6, f"{recipe} casting": 2.0}
        compare(report, op, calls, recipe, bars)
        calls = {"torch": forward(plain, x), f"{recipe} enter": entered(forward(ours, x), recipe)}
        compare(report, op, calls, "bf16", {})
    op = "Linear forward + backward"
    for recipe in contenders.RECIPES:
        calls = {"torch": forward_backward(plain, x), recipe: forward_backward(ours, x)}
        compare(report, op, calls, recipe, {recipe: 1.5} if recipe != "bf16" else {})


def measure_larger(report: Report) -> None:
    """Measure LayerNormMLP and TransformerLayer; the bar is for the FP8 forward of the latter."""
    x = random(SIZE.batch, SIZE.sequence, FEATURES).requires_grad_()
    pairs = {
        "LayerNormMLP": (PlainMLP(FEATURES, SIZE.ffn), our_mlp(FEATURES, SIZE.ffn)),
        "TransformerLayer": (PlainLayer(SIZE), our_layer(SIZE)),
    }
    for name, (plain, ours) in pairs.items():
        for recipe in contenders.RECIPES:
            judged = name == "TransformerLayer" and recipe.startswith("fp8")
            calls = {"torch": forward(plain, x), recipe: forward(ours, x)}
            compare(report, f"{name} forward", calls, recipe, {recipe: 1.3} if judged else {})
            calls = {"torch": forward_backward(plain, x), recipe: forward_backward(ours, x)}
            compare(report, f"{name} forward + backward", calls, recipe, {})


def main() -> None:
    require_gpu()
    report = Report("host")
    measure_linear(report)
    measure_larger(report)
    report.save()


if __name__ == "__main__":
    main()
