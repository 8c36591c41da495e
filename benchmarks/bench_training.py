"""Complete training steps of language models on one GPU, in tokens per second.

A step is embedding, layers, norm, vocabulary projection, cross entropy, gradient clipping and AdamW
with fp32 masters; the data is in GPU memory. Models compute in bf16, ours also in FP8. Ours uses
`linear_cross_entropy` and `FusedAdam` outside of the layers.

`ratio` is relative to the tokens per second of the same model in plain torch with `torch.compile`.
`mfu` is the model FLOP/s (`Architecture.flops_of_a_token`) as a share of the GPU's dense bf16 peak,
also if they run in FP8. `gib` is the peak memory of a step, including what stays in memory between
steps. `loss` is the mean of the last eight steps.

    bench_training.py                                     8k tokens; ours not compiled
    bench_training.py --models 125m --rows torch "ours .*"
    bench_training.py --models 350m --largest             the largest batch in 80 GiB
    bench_training.py --losses 200                        train for this number of steps
    bench_training.py --profile                           print the longest kernels, too
    bench_training.py --tiny                              on a CPU, to test this file

Each model has its own file of results. `merge_training.py` adds the results of a run with only some
of the rows to it. A row that fails prints why and is left out.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from attention_cases import has_flash_attn_4
from harness import Report, require_gpu, time_wall_each
from profiling import profile_calls
from training_costs import largest_costs
from training_models import ARCHITECTURES, TINY, Architecture
from training_steps import BATCHES, ON_GPU, Row, Training

PEAK_FLOPS = 989.4e12  # dense bf16 of Hopper
TOKENS = 8192
LIMIT = 80 * 2**30
CLOSE = 1.04  # the search for the largest batch ends if the next one is not larger by this
KERNELS = 40  # most kernels that a profile prints
YARDSTICK = Row("torch", compiled=True)
FP8 = (
    Row("ours", "fp8 delayed", fp8_head=True),
    Row("ours", "fp8 delayed", fp8_head=True, fp8_attention=True),
    Row("ours", "fp8 delayed"),
    Row("ours", "fp8 current"),
    Row("ours", "fp8 delayed", fp8_weights=True),
    Row("ours", "fp8 delayed", fp8_weights=True, fp8_head=True),
)
OURS = (Row("ours"), *FP8)
# In the order of measurement: if a run is interrupted, the most important rows are there.
ROWS = (
    *(replace(row, in_graphs=True) for row in OURS),
    YARDSTICK,
    *OURS,
    Row("torch"),
    replace(YARDSTICK, in_graphs=True),
    Row("torchao", compiled=True),
    *(replace(row, compiled=True) for row in OURS),
    *(replace(row, compiled=True, in_graphs=True) for row in OURS),
)
# Without most compiled rows, each of which takes the compiler twenty seconds or more.
DEFAULT = tuple(row for row in ROWS if row == YARDSTICK or not row.compiled)
# Bars for our best rows: bf16 and FP8 relative to the yardstick; then FP8 relative to torchao.
BARS = {"125m": (1.15, 1.45), "350m": (1.10, 1.50), "1.3b": (1.05, 1.50)}
TORCHAO_BAR = 1.15

Found = dict[Row, dict[str, Any]]


def train(row: Row, sizes: Architecture, batch: int, options: Any) -> dict[str, Any]:
    """Train a row and return its figures."""
    training = Training(row, sizes, batch, options.torch_adam)
    training.start()
    loops, calls, warmup = (5, 2, 1) if ON_GPU else (2, 1, 0)
    contenders = {"": training.step}
    timing = time_wall_each(contenders, loops=loops, calls=calls, warmup=warmup)[""]
    while training.done < options.losses - BATCHES:
        training.step()
    loss = training.mean_loss()
    limits = what_limits(training) if options.profile and ON_GPU else {}
    tokens_per_second = batch * sizes.sequence / timing.median_us * 1e6
    return {
        "batch": batch,
        "ms": round(timing.median_us / 1e3, 2),
        "tokens_per_s": round(tokens_per_second),
        "mfu": round(tokens_per_second * sizes.flops_of_a_token / PEAK_FLOPS, 3),
        "gib": round(training.peak / 2**30, 2),
        "loss": round(loss, 4),
        "steps": training.done,
        "p10_us": round(timing.p10_us, 1),
        "p90_us": round(timing.p90_us, 1),
        **limits,
    }


def what_limits(training: Training) -> dict[str, Any]:
    """Share of the time in which a kernel runs, and the kinds of kernels that take longest."""
    profile = profile_calls(training.step, calls=3)
    for kernel, microseconds in sorted(profile.times.items(), key=lambda item: -item[1])[:KERNELS]:
        print(f"{microseconds:10.0f} us  {kernel[:150]}")
    return {"busy": round(profile.busy, 3), "costs": largest_costs(profile)}


def free() -> None:
    """Free the memory and the compiled code of the last row."""
    gc.collect()
    torch._dynamo.reset()
    if ON_GPU:
        torch.cuda.empty_cache()


def train_largest(row: Row, sizes: Architecture, options: Any) -> dict[str, Any]:
    """Figures with the largest batch that fits into memory, within 4 %.

    The next batch to try is extrapolated from the last two that ran, but below one that failed.
    """
    batch, failed = max(1, TOKENS // sizes.sequence), None
    ran: list[dict[str, Any]] = []
    while not ran or batch > max(ran[-1]["batch"], int(ran[-1]["batch"] * CLOSE)):
        try:
            ran.append(train(row, sizes, batch, options))
            print(f"{row}: {batch} sequences take {ran[-1]['gib']} GiB", flush=True)
        except torch.OutOfMemoryError:
            print(f"{row}: out of memory with {batch} sequences", flush=True)
            failed = batch
            if not ran:
                raise
        free()
        batch = next_batch(ran, failed)
    return ran[-1]


def next_batch(ran: Sequence[dict[str, Any]], failed: int | None) -> int:
    """The next batch to try, from the batches that ran and the smallest that did not fit."""
    last = ran[-1]
    if len(ran) == 1:
        batch = 2 * last["batch"]
    else:
        sequences = last["batch"] - ran[-2]["batch"]
        of_a_sequence = max(1e-3, (last["gib"] - ran[-2]["gib"]) / sequences)
        batch = last["batch"] + int((LIMIT / 2**30 - last["gib"]) / of_a_sequence)
    if failed is not None and batch >= failed:
        batch = max((last["batch"] + failed) // 2, failed * 7 // 8)
    return batch


def measure(report: Report, sizes: Architecture, rows: Sequence[Row], options: Any) -> Found:
    """Add a row to the report for each of `rows`; rows that fail are left out."""
    found: Found = {}
    for row in rows:
        if row.missing is not None:
            print(f"{row}: {row.missing} is not installed, so the row is left out", flush=True)
            continue
        try:
            if options.largest:
                figures = train_largest(row, sizes, options)
            else:
                batch = max(1, options.tokens // sizes.sequence)
                figures = train(row, sizes, batch, options)
        except Exception:  # continue with the other rows
            traceback.print_exc()
            print(f"{sizes.name}, {row}: failed", flush=True)
            free()
            continue
        free()
        found[row] = figures
        kind = "training"
        if options.largest:
            kind = "largest batch of"
            del figures["loss"]  # depends on the batch
        report.row(op=f"{kind} {sizes.name} s{sizes.sequence}", case=case_of(row), **figures)
        add_ratios(report.rows)
        report.save()
    return found


def case_of(row: Row) -> str:
    """The name of a row, with flash-attn 4 if that is installed and runs our attention."""
    with_flash = row.library == "ours" and not row.fp8_attention and has_flash_attn_4()
    return f"{row}, flash-attn 4" if with_flash else str(row)


def add_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Set the ratio of each row, if the yardstick is among the rows."""
    speeds = {row["case"]: row["tokens_per_s"] for row in rows}
    if str(YARDSTICK) in speeds:
        for row in rows:
            row["ratio"] = round(row["tokens_per_s"] / speeds[str(YARDSTICK)], 3)


def judge(report: Report, name: str, sizes: Architecture, found: Found, largest: bool) -> None:
    """Add rows that compare our best rows with those of other libraries."""
    ours = [row for row in found if row.library == "ours"]
    others = [row for row in found if row.library != "ours"]
    kinds = {"bf16": [r for r in ours if r.precision == "bf16"]}
    kinds["fp8"] = [r for r in ours if r.precision != "bf16"]
    for kind, bar in zip(kinds, BARS[name], strict=True):
        if not kinds[kind] or YARDSTICK not in found:
            continue
        best = max(kinds[kind], key=lambda row: found[row]["tokens_per_s"])
        case = f"{sizes.name}: {case_of(best)}"
        speed = found[best]["tokens_per_s"]
        ratio = round(speed / found[YARDSTICK]["tokens_per_s"], 3)
        report.row(op=f"{kind} over torch.compile", case=case, ratio=ratio, bar=bar)
        for torchao in (row for row in others if row.library == "torchao" and kind == "fp8"):
            ratio = round(speed / found[torchao]["tokens_per_s"], 3)
            report.row(op="fp8 over torchao", case=case, ratio=ratio, bar=TORCHAO_BAR)
        if largest:
            most = max(found[row]["batch"] for row in kinds[kind])
            ratio = round(most / max(found[row]["batch"] for row in others), 3)
            op = f"{kind} batch over the largest of others"
            report.row(op=op, case=sizes.name, ratio=ratio, bar=1.0)
            continue
        least = min(found[row]["gib"] for row in kinds[kind])
        by = min(found[row]["gib"] for row in others)
        if by:  # zero on a CPU, where memory is not measured
            ratio = round(least / by, 3)
            op = f"{kind} peak memory over the least of others"
            report.row(op=op, case=sizes.name, ratio=ratio, bar=1.0, better="lower")


def options_of(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(description="Complete training steps on one GPU.")
    parser.add_argument("--models", nargs="+", choices=list(ARCHITECTURES), help="all by default")
    parser.add_argument("--rows", nargs="+", help="regular expressions of whole names")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="in a batch")
    parser.add_argument("--largest", action="store_true", help="the largest batch in 80 GiB")
    parser.add_argument("--losses", type=int, default=0, metavar="STEPS", help="train for as long")
    parser.add_argument("--profile", action="store_true", help="what the time goes to")
    parser.add_argument("--torch-adam", action="store_true", help="torch's optimizer for ours, too")
    parser.add_argument("--tiny", action="store_true", help="small models, on a CPU too")
    return parser.parse_args(arguments)


def chosen(names: list[str] | None) -> list[Row]:
    """The rows whose names match one of the regular expressions, in the order of `ROWS`."""
    if names is None:
        return list(DEFAULT)
    return [row for row in ROWS if any(re.fullmatch(name, str(row)) for name in names)]


def main(arguments: Sequence[str] | None = None) -> int:
    options, failed = options_of(arguments), 0
    rows = chosen(options.rows)
    if options.list:
        print("\n".join(map(str, ROWS)))
        return 0
    if not options.tiny:
        require_gpu()
    if options.largest:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, LIMIT / whole))
    if not has_flash_attn_4():
        print("flash-attn 4 is not installed, so no row runs its attention")
    print("NVIDIA's Transformer Engine has the name of this package: no row runs it here")
    models = TINY if options.tiny else ARCHITECTURES
    for name in options.models or list(models):
        sizes = models[name]
        kind = "_tiny" * options.tiny + "_largest" * options.largest
        report = Report(f"training_{name}{kind}")
        found = measure(report, sizes, rows, options)
        judge(report, name, sizes, found, options.largest)
        report.save()
        failed += sum(row.missing is None for row in rows) - len(found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
