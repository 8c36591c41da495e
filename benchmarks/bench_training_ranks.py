"""Complete training steps of language models on two GPUs, relative to one GPU.

Models and steps are our rows of bench_training, not compiled. One GPU trains on 8k tokens per step,
two GPUs on 16k. With replicas (DDP) and shards (FSDP2; in FP8 with FP8 weights), each GPU has 8k
tokens; with shared layers (TP2 + SP), both GPUs work on all tokens.

`ratio` is the tokens per second of two GPUs divided by those of one GPU; for the latter, both GPUs
train at the same time, each by itself. `gib` is the peak memory of a step, including what stays in
memory between steps. `loss` is the mean of the last eight steps; all ways to use two GPUs train on
the same sequences.

    bench_training_ranks.py --models 125m --precisions bf16 --ways DDP FSDP2
    bench_training_ranks.py --graphs                      steps in CUDA graphs
    bench_training_ranks.py --dry-run                     on a CPU, to test this file

Each model has its own file of results. A failure is printed and ends the measurements of its model;
earlier measurements are kept.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any

from bench_replicas import over_one
from bench_training import TOKENS
from gpu_ranks import Rank, run_on_ranks
from harness import Timing
from training_models import ARCHITECTURES, TINY, Architecture
from training_steps import OneGpu, Row, Training
from training_ways import Replicas, Shards, SharedLayers

import transformer_engine.pytorch as te

PRECISIONS = ("bf16", "fp8 delayed")
WAYS: dict[str, type[OneGpu]] = {"DDP": Replicas, "FSDP2": Shards, "TP2 + SP": SharedLayers}
ONE_GPU = "one GPU"
BAR = 1.9
STEPS = {"loops": 6, "calls": 5, "warmup": 5}


def sequences(sizes: Architecture, rank: Rank) -> int:
    """The number of sequences in a step on one GPU."""
    return rank.either(TOKENS // sizes.sequence, 2)


def trained(
    rank: Rank, row: Row, sizes: Architecture, batch: int, way: OneGpu
) -> tuple[Timing, dict[str, float]]:
    """Train; returns the time of a step, and further fields of the row."""
    training = Training(row, sizes, batch, way=way)
    training.start()
    timing = rank.time_wall({"": training.step}, **STEPS)[""]
    loss = sum(rank.gathered(training.mean_loss())) / rank.count
    tokens = batch * sizes.sequence
    return timing, {
        "tokens_per_s": round(tokens / timing.median_us * 1e6),
        "gib": round(training.peak / 2**30, 2),
        "loss": round(loss, 4),
    }


def measure_ways(rank: Rank, sizes: Architecture, precision: str, options: Any) -> None:
    """Measure one GPU and each way to use two, one after the other, as memory is limited."""
    times: dict[str, Timing] = {}
    for name in (ONE_GPU, *options.ways):
        fp8_weights = name == "FSDP2" and precision != "bf16"
        row = Row("ours", precision, fp8_weights, in_graphs=options.graphs)
        way = OneGpu(rank.alone) if name == ONE_GPU else WAYS[name]()
        batch = sequences(sizes, rank) * (1 if name == ONE_GPU else rank.count)
        times[name], more = trained(rank, row, sizes, batch, way)
        op = f"training {sizes.name} s{sizes.sequence}, 2 GPUs"
        rank.row(op=op, case=precision, **over_one(rank, times, BAR)[-1], **more)
        rank.save()
        rank.free()


def measure(rank: Rank, model: str, options: Any) -> None:
    sizes = rank.either(ARCHITECTURES, TINY)[model]
    te.initialize_ub(
        [rank.count * sequences(sizes, rank) * sizes.sequence, sizes.hidden], rank.count
    )
    for precision in options.precisions:
        measure_ways(rank, sizes, precision, options)


def options_of(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(description="Complete training steps on two GPUs.")
    parser.add_argument("--models", nargs="+", choices=list(ARCHITECTURES), help="all by default")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--graphs", action="store_true", help="each step is one CUDA graph")
    parser.add_argument("--dry-run", action="store_true", help="small models, on a CPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options, failed = options_of(arguments), 0
    for model in options.models or (TINY if options.dry_run else ARCHITECTURES):
        name = f"training_ranks_{model}{'_graphs' * options.graphs}"
        try:
            run_on_ranks(name, partial(measure, model=model, options=options))
        except Exception:  # continue with the other models
            traceback.print_exc()
            print(f"{name}: failed", flush=True)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
