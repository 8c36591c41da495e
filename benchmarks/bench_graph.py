"""The GPT of bench_gpt, forward and backward in a CUDA graph, relative to plain torch eager.

`layers` is the stack of layers, for which there is a bar; `step` is a whole training step with
AdamW. `idle` is the share of time, from the first to the last kernel of ten replays, in which no
kernel runs.

The largest part of the remaining idle time is around the memsets with which cuDNN sets a counter to
zero before both of its graphs: a memset of 0.8 us has a gap of 1.4 us before it and 3 us after it.
"""

from __future__ import annotations

from collections.abc import Callable

from bench_gpt import prepare, training_step
from contenders import step
from harness import Report, captured, over, require_gpu, time_gpu_each
from profiling import profile_calls

BAR, IDLE_BAR = 0.68, 0.03


def measure(report: Report, op: str, steps: dict[str, Callable[[], None]], judge: bool) -> None:
    graphs = {f"{name}, captured": captured(run) for name, run in steps.items()}
    times = time_gpu_each({"torch": steps["torch"], **graphs}, repeats=30, warmup=10, cold=False)
    for name, timing in times.items():
        row = {"op": op, "case": name, **over(timing, times["torch"].median_us)}
        if judge and name in graphs and not name.startswith("torch"):
            row.update(bar=BAR, better="lower")
        report.row(**row)
    for name, replay in graphs.items():
        ours = not name.startswith("torch")
        bar = {"bar": IDLE_BAR, "better": "lower"} if judge and ours else {}
        idle = round(1.0 - profile_calls(replay).busy, 4)
        report.row(op=f"{op}, idle", case=name, ratio=idle, **bar)


def main() -> None:
    require_gpu()
    report = Report("graph")
    models, x, tokens = prepare()
    stacks = {name: step(model.layers, x, name) for name, model in models.items()}
    measure(report, "layers", stacks, judge=True)
    whole = {
        name: training_step(model, tokens, name, capturable=True) for name, model in models.items()
    }
    measure(report, "step", whole, judge=False)
    report.save()


if __name__ == "__main__":
    main()
