"""What each rank of distributed/test_one_shot runs: one-shot collectives and their definitions."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_device import here

from transformer_engine.pytorch.parallel import collectives
from transformer_engine.pytorch.parallel.one_shot import one_shot_of


def _drawn(rank: int) -> torch.Tensor:
    """Returns the input of a rank. Every rank can draw it."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(12, 5, generator=generator).to(here(), torch.bfloat16)


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    """Sums in fp32, in the order of ranks, and rounds once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def _wrong(group: Any, ranks: list[int]) -> list[str]:
    """Returns the names of the collectives of a group whose results differ from the definition."""
    own, count = ranks.index(dist.get_rank()), len(ranks)
    parts, x = [_drawn(rank) for rank in ranks], _drawn(dist.get_rank())
    mine = [part.chunk(count)[own] for part in parts]
    found = {
        "all-gather": (collectives.all_gather(x, group).wait(), torch.cat(parts)),
        "reduce-scatter": (collectives.reduce_scatter(x, group).wait(), summed(mine)),
        "all-to-all": (collectives.all_to_all(x, group).wait(), torch.cat(mine)),
        "all-reduce": (collectives.all_reduce(x.clone(), group).wait(), summed(parts)),
        "maximum": (
            collectives.all_reduce(x.clone(), group, "max").wait(),
            torch.stack(parts).amax(0),
        ),
    }
    return [name for name, (got, wanted) in found.items() if not torch.equal(got, wanted)]


def all_of_them(rank: int) -> list[str]:
    """Returns the wrong collectives of the group of all ranks and of a smaller group."""
    ranks = [*range(dist.get_world_size())]
    smaller = dist.new_group(ranks[1:]) if len(ranks) > 2 else None
    groups = [(dist.group.WORLD, ranks)]
    if smaller is not None and rank in ranks[1:]:
        groups.append((smaller, ranks[1:]))
    wrong = []
    for group, members in groups:
        for _ in range(3):
            wrong += _wrong(group, members)
        if one_shot_of(group, here()) is None:
            wrong.append("no one-shot collectives")
    return wrong


def without(rank: int) -> list[str]:
    """Returns the wrong collectives when one-shot collectives are switched off."""
    os.environ["TE_ONE_SHOT_COLLECTIVES"] = "0"
    wrong = _wrong(dist.group.WORLD, [*range(dist.get_world_size())])
    if one_shot_of(dist.group.WORLD, here()) is not None:
        wrong.append("one-shot collectives")
    return wrong


def ends_early(rank: int, ready: str, outcome: str) -> None:
    """Rank 1 exits while rank 0 waits for it in a collective.

    Both leave with `os._exit`; the process of rank 1 is not reaped before both have ended.
    """
    dist.init_process_group("gloo", init_method=f"file://{ready}", rank=rank, world_size=2)
    x = torch.ones(4)
    collectives.all_reduce(x, dist.group.WORLD)
    if rank == 1:
        os._exit(0)
    try:
        collectives.all_reduce(x, dist.group.WORLD)
    except RuntimeError as error:
        Path(outcome).write_text(str(error))
    os._exit(0)
