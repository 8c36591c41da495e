"""What each rank of test_benchmarks runs: the dry run of the benchmark that trains on two GPUs."""

from typing import Any

from bench_training_ranks import measure, options_of, sequences, trained
from gpu_ranks import Rank
from training_models import TINY
from training_steps import OneGpu, Row


def dry_run(number: int, model: str, precision: str) -> tuple[list[dict[str, Any]], float]:
    """Returns the rows of this rank, and the loss of one process that trains on all data."""
    rank, sizes = Rank(number, "training_ranks", dry=True), TINY[model]
    measure(rank, model, options_of(["--precisions", precision]))
    batch = rank.count * sequences(sizes, rank)
    _, alone = trained(rank, Row("ours", precision), sizes, batch, OneGpu(rank.alone))
    return [] if rank.report is None else rank.report.rows, alone["loss"]
