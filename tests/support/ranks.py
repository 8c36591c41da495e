"""Starts processes of several ranks, over gloo or NCCL.

Importing torch and this package takes seconds. Ranks over gloo are therefore forked from one server
process that has imported them; they have the environment variables of the first start. CUDA does
not survive a fork, so ranks over NCCL are spawned.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import amax_ranks
import checkpoint_ranks
import cross_entropy_ranks
import debug_rank_cases
import debug_shared_layers
import first_dimension_ranks
import statistics_ranks
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from garbage import collect_seldom

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "transformer_engine.pytorch",
        "torch._dynamo",
        "torch._inductor.compile_fx",  # any compiler backend imports much of it
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
    ]
)
SCENARIOS = (
    amax_ranks.chosen_quantizers,
    amax_ranks.quantizers_of_a_group,
    amax_ranks.scales_of_a_group,
    checkpoint_ranks.kept_parts,
    cross_entropy_ranks.losses_and_gradients,
    cross_entropy_ranks.compiled_losses_and_gradients,
    cross_entropy_ranks.linear_losses_and_gradients,
    first_dimension_ranks.along_the_first_dimension,
    *statistics_ranks.SCENARIOS,
)
SESSIONS = (
    *statistics_ranks.SESSIONS,
    *debug_rank_cases.SESSIONS,
    debug_shared_layers.shared_layers,
    debug_shared_layers.compiled_shared_layers,
    debug_shared_layers.gathered_norms,
)


def start_ranks(
    function: Callable[..., Any], arguments: tuple[Any, ...], world_size: int, backend: str
) -> None:
    """Runs `function(rank, *arguments)` in `world_size` processes until all have ended."""
    method = "forkserver" if backend == "gloo" else "spawn"
    mp.start_processes(function, arguments, nprocs=world_size, start_method=method)


def run_rank(rank: int, backend: str, store: str, results: str) -> None:
    """Saves the result of every scenario on this rank, by name."""
    with _joined(rank, 2, backend, store, seconds=60):
        outcomes = {run.__name__: run(rank) for run in SCENARIOS}
        for session in SESSIONS:
            outcomes[session.__name__] = session(rank, Path(results) / session.__name__)
        torch.save(outcomes, f"{results}.{rank}")


def run_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo"
) -> list[Any]:
    """Returns the result of `function(rank, *arguments)` of each of `world_size` ranks."""
    with TemporaryDirectory() as folder:
        spawned = (world_size, backend, folder, function, arguments)
        start_ranks(_run_one, spawned, world_size, backend)
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(world_size)]


def _run_one(
    rank: int, world_size: int, backend: str, folder: str, function: Any, arguments: Any
) -> None:
    # A long timeout, because other processes may keep the cores busy.
    with _joined(rank, world_size, backend, f"{folder}/store", seconds=240):
        torch.save(function(rank, *arguments), f"{folder}/{rank}")


@contextmanager
def _joined(rank: int, world_size: int, backend: str, store: str, seconds: float) -> Iterator[None]:
    """Makes this process a rank with one thread; an exception ends the process."""
    torch.set_num_threads(1)
    collect_seldom()
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
    )
    yield
    dist.destroy_process_group()
