"""What each rank of distributed/test_killed_rank runs: a training of which one rank dies."""

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from replica_reference import RECIPES, alone, differences, make, one_process, one_rank
from torch.nn.parallel import DistributedDataParallel

STEPS, LAST_STEP = 4, 2  # of the run, and of rank 1, which then dies


def train(rank: int, folder: Path, dies: bool) -> None:
    """Go on from the last checkpoint, and save after every step; say how it ended."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / f'store {dies}'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    torch.set_num_threads(1)
    try:
        found = _run(rank, folder / "checkpoint", dies)
    except RuntimeError as error:
        (folder / f"error {rank}").write_text(str(error))
        os._exit(1)
    torch.save(found, folder / f"found {rank}")
    dist.destroy_process_group()


def _run(rank: int, checkpoint: Path, dies: bool) -> dict[str, Any]:
    recipe, group = RECIPES["delayed"], alone(rank)
    model, reference = make("TransformerLayer"), make("TransformerLayer")
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    done, losses = 0, []
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done, losses = state["done"], state["losses"]
    while done < STEPS:
        if dies and rank == 1 and done == LAST_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        losses += one_rank(wrapped, recipe, rank, optimizer, range(done, done + 1))
        done += 1
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if rank == 0:
            torch.save({**state, "done": done, "losses": losses}, checkpoint)
    adamw = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    expected = one_process(reference, recipe, group, adamw, range(STEPS))
    return {
        "losses": losses,
        "expected": expected,
        "differences": differences(model, reference),
    }
