"""Processes of a gloo group that run functions; each start takes seconds, so they run many."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=60)


def _rank(
    rank: int, folder: str, world_size: int, run: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    torch.save(run(rank, *arguments), f"{folder}/result.{rank}")
    dist.barrier()
    dist.destroy_process_group()


def spawned(folder: Path, world_size: int, run: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `run(rank, *arguments)` returns on each rank.

    Args:
        folder: an empty one.
        world_size: how many processes.
        run: of a module that processes can import.
        arguments: of all ranks.
    """
    context = mp.spawn(
        _rank, (str(folder), world_size, run, arguments), nprocs=world_size, join=False
    )
    end = time.monotonic() + 4 * TIMEOUT.total_seconds()
    while not context.join(1.0):
        if time.monotonic() > end:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{run.__name__} hangs on {world_size} ranks")
    return [torch.load(folder / f"result.{rank}") for rank in range(world_size)]
