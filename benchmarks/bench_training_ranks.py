"""Complete training steps of language models on two GPUs, in tokens a second over one GPU.

Models and steps are those of bench_training, ours, not compiled. One GPU trains 8k tokens a step.
Two GPUs train 16k: replicas (DDP) and shards (FSDP2, under FP8 with weights in FP8) have 8k each;
with shared layers (TP2 + SP) both work on all.

`ratio` is tokens a second of two GPUs over those of one, which both run at once here, each for
itself. `gib` is the peak of a step with all that is in memory between steps. `loss` is that of the
last eight steps: ways of two GPUs have the same sequences.

    bench_training_ranks.py --models 125m --precisions bf16 --ways DDP FSDP2
    bench_training_ranks.py --graphs                      steps in CUDA graphs
    bench_training_ranks.py --dry-run                     on a CPU, to see that all runs

Each model has a file of results. What fails ends its model, says why, and leaves what was measured.
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
    """Of a step on one GPU."""
    return rank.either(TOKENS // sizes.sequence, 2)


def trained(
    rank: Rank, row: Row, sizes: Architecture, batch: int, way: OneGpu
) -> tuple[Timing, dict[str, float]]:
    """The time of a step, and what else a row says of it."""
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
    """One GPU, and the ways of two, one after the other: together they would not fit."""
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
        except Exception:  # the others are worth their time all the same
            traceback.print_exc()
            print(f"{name}: failed", flush=True)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
