"""Two processes for all tests of ranks, over gloo or NCCL: each start takes seconds."""

from datetime import timedelta
from pathlib import Path

import amax_ranks
import checkpoint_ranks
import cross_entropy_ranks
import debug_rank_cases
import statistics_ranks
import torch
import torch.distributed as dist

SCENARIOS = (
    amax_ranks.scales_of_a_group,
    checkpoint_ranks.kept_parts,
    cross_entropy_ranks.losses_and_gradients,
    cross_entropy_ranks.compiled_losses_and_gradients,
    *statistics_ranks.SCENARIOS,
)


def run_rank(rank: int, backend: str, store: str, results: str) -> None:
    """Save what every scenario gives on this rank, by name."""
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    torch.set_num_threads(1)
    outcomes = {run.__name__: run(rank) for run in SCENARIOS}
    for session in (*statistics_ranks.SESSIONS, *debug_rank_cases.SESSIONS):
        outcomes[session.__name__] = session(rank, Path(results) / session.__name__)
    torch.save(outcomes, f"{results}.{rank}")
    dist.destroy_process_group()
