"""Layers with tensor and sequence parallelism, relative to one GPU's time divided by the ranks.

    bench_parallel.py             two GPUs
    bench_parallel.py --ranks 4   four GPUs, and two pairs that run at the same time

`ratio` is the time of the slowest rank divided by one GPU's share, its time for the whole layer
divided by the ranks. `alone_ms` is the time of the collectives of a step, one after the other and
without computing. `compute_ms` is the time of a step whose collectives do not communicate. `hidden`
is the share of the collectives' time that computing hides: 1 - (step - `compute_ms`) / `alone_ms`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from attention_cases import Call
from contenders import DEVICE, DTYPE, Size, our_layer, random, step
from gpu_ranks import Rank, run_on_ranks
from harness import over
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers a backend

import transformer_engine.pytorch as te
from transformer_engine.pytorch.parallel.collectives import gather_into, scatter_into


class Goal(NamedTuple):
    """Milliseconds of a layer in one precision.

    Attributes:
        nvidia: the time of NVIDIA's TE 2.20.2.
        bar: the time that we want to reach; None if there is no goal.
        share: one GPU's time divided by the ranks, on the machine of the other two times. Goals are
            relative to it, because GPUs differ by some percent.
    """

    nvidia: float
    bar: float | None
    share: float


# Goals by the number of ranks, with tensor and sequence parallelism.
Goals = dict[int, Goal]
LAYERS: dict[Size, dict[str, Goals]] = {
    Size(4096, 16384, 32, 4096, 4): {
        "fp8 delayed": {2: Goal(13.49, 11.8, 10.7), 4: Goal(7.90, 6.6, 5.35)},
        "fp8 current": {2: Goal(14.20, 12.4, 11.2), 4: Goal(8.31, None, 5.6)},
        "bf16": {2: Goal(20.25, 17.9, 16.4), 4: Goal(11.61, None, 8.2)},
    },
    Size(8192, 28672, 64, 4096, 1): {
        "fp8 delayed": {2: Goal(10.28, 9.3, 8.8), 4: Goal(5.83, 5.1, 4.4)},
        "fp8 current": {2: Goal(11.02, 9.9, 9.2), 4: Goal(6.23, None, 4.6)},
        "bf16": {2: Goal(16.45, 14.9, 14.1), 4: Goal(9.13, None, 7.05)},
    },
}


def layer_step(size: Size, name: str, group: Any) -> Call:
    """A forward and backward of a layer with tensor parallelism over a group."""
    ranks = dist.get_world_size(group)
    shared = {"tp_group": group, "tp_size": ranks, "sequence_parallel": True}
    shared |= {"set_parallel_mode": True, "ub_tp_comm_overlap": True}
    layer = our_layer(size, attn_input_format="sbhd", **(shared if ranks > 1 else {}))
    return step(layer, random(size.sequence // ranks, size.batch, size.hidden), name, group)


def collectives_alone(step: Call, group: Any = None) -> Call:
    """A call that runs the collectives of a step one after the other, without computing."""
    te.parallel_report(reset=True)
    step()
    ranks = dist.get_world_size(group)
    calls: list[Call] = []
    for sent, (count, nbytes) in te.parallel_report(reset=True).counts.items():
        own = torch.zeros(nbytes // count // DTYPE.itemsize, device=DEVICE, dtype=DTYPE)
        how = {"group": group, "async_op": True}
        if sent.collective == "all-reduce":
            calls += [partial(dist.all_reduce, own, **how)] * count
            continue
        gathers = sent.collective == "all-gather"
        other = own.new_zeros(own.numel() * ranks if gathers else own.numel() // ranks)
        calls += [partial(gather_into if gathers else scatter_into, other, own, **how)] * count

    def run() -> None:
        for call in calls:
            call().wait()

    return run


def measure_layer(rank: Rank, size: Size, name: str, goal: Goal, groups: tuple[Any, Any]) -> None:
    """Measure a transformer layer in one precision.

    Args:
        groups: the group of the ranks that share the layer, and a group of as many ranks with
            torch's fake backend, whose collectives only copy the data of this rank.
    """
    shared, lone = groups
    contenders = {"one GPU": layer_step(size, name, rank.alone)}
    contenders["ranks"] = layer_step(size, name, shared)
    contenders["collectives"] = collectives_alone(contenders["ranks"], shared)
    contenders["compute"] = layer_step(size, name, lone)
    times = rank.time_gpu(contenders, repeats=15, warmup=6)
    us = {what: timing.median_us for what, timing in times.items()}
    ranks = dist.get_world_size(shared)
    share = us["one GPU"] / ranks
    row = {**over(times["ranks"], share), "nvidia_ms": goal.nvidia}
    row["share_ms"] = round(share / 1e3, 3)
    row["alone_ms"] = round(us["collectives"] / 1e3, 3)
    row["compute_ms"] = round(us["compute"] / 1e3, 3)
    row["hidden"] = round(1 - (us["ranks"] - us["compute"]) / us["collectives"], 3)
    if goal.bar is not None and ranks == rank.count:
        row |= {"bar": round(goal.bar / goal.share, 3), "better": "lower"}
    rank.row(op=f"layer, TP{ranks} + SP, forward + backward", case=f"{size} {name}", **row)


def measure(rank: Rank) -> None:
    layers = rank.either(LAYERS, {Size(64, 128, 4, 32, 1): next(iter(LAYERS.values()))})
    largest = [max(s.sequence * s.batch for s in layers), max(s.hidden for s in layers)]
    lone = rank.neighbours("fake")
    for ranks in [count for count in rank.groups if count > 1]:
        te.initialize_ub(largest, ranks)
        for size, precisions in layers.items():
            for name, goals in precisions.items():
                measure_layer(rank, size, name, goals[ranks], (rank.groups[ranks], lone[ranks]))
                rank.save()
                rank.free()
        te.destroy_ub()


if __name__ == "__main__":
    run_on_ranks("parallel", measure)
