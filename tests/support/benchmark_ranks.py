"""What each rank of test_benchmarks runs: trainings of two GPUs, as their dry run has them."""

from typing import Any

from bench_training_ranks import STEPS, measure, options_of, sequences, trained
from gpu_ranks import Rank
from training_models import TINY
from training_steps import OneGpu, Row


def dry_run(number: int, model: str, precision: str) -> tuple[list[dict[str, Any]], float]:
    """The rows of this rank, and the loss of one process that trains on what both train on."""
    STEPS.update(loops=2, calls=3, warmup=2)  # of the eight whose losses count
    rank, sizes = Rank(number, "training_ranks", dry=True), TINY[model]
    measure(rank, model, options_of(["--precisions", precision]))
    batch = rank.count * sequences(sizes, rank)
    _, alone = trained(rank, Row("ours", precision), sizes, batch, OneGpu(rank.alone))
    return [] if rank.report is None else rank.report.rows, alone["loss"]
