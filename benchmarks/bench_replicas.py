"""Data parallel training of a GPT on two GPUs, each with a replica and its own data (DDP).

`ratio` is the tokens per second of two GPUs divided by those of one GPU, which trains the same
model on as many tokens as each of the two. For comparison, there are rows with layers of plain
torch, with larger buckets, and with fewer thread blocks for NCCL, which leaves more multiprocessors
to the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import bench_gpt
import torch
import torch.distributed as dist
from bench_gpt import GPT, training_step
from contenders import DEVICE, PlainLayer, Size, our_layer
from gpu_ranks import Rank, run_on_ranks
from harness import Timing
from torch.nn.parallel import DistributedDataParallel

TINY = Size(hidden=64, ffn=128, heads=4, sequence=32, batch=1)
PRECISIONS = ("torch", "bf16", "fp8 delayed", "fp8 current")
BAR = 1.9
LARGE_BUCKETS, FEW_BLOCKS = 100, (4, 8)  # MiB; thread blocks of NCCL's kernels


def over_one(
    rank: Rank, times: Mapping[str, Timing], bar: float | None = None
) -> list[dict[str, Any]]:
    """Rows for the report, with the speed of several GPUs relative to one."""
    one = times["one GPU"].median_us
    rows = []
    for name, timing in times.items():
        gpus = 1 if name == "one GPU" else rank.count
        row = {"way": name, "ms": round(timing.median_us / 1e3, 3)}
        row |= {"ratio": round(gpus * one / timing.median_us, 3)}
        row |= {"p10_us": round(timing.p10_us, 1), "p90_us": round(timing.p90_us, 1)}
        rows.append({**row, "bar": bar} if bar is not None and gpus > 1 else row)
    return rows


def groups_of(rank: Rank) -> dict[str, Any]:
    """Process groups of all ranks with different NCCL options, by the name of the row."""
    found: dict[str, Any] = {}
    for blocks in rank.either(FEW_BLOCKS, ()):
        options: Any = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = blocks
        found[f"DDP, {blocks} blocks"] = dist.new_group(pg_options=options)
    return found


def wraps(groups: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Arguments of DistributedDataParallel, by the name of the row."""
    found: dict[str, dict[str, Any]] = {"DDP": {}, "DDP that reduces nothing": {}}
    found[f"DDP, buckets of {LARGE_BUCKETS} MiB"] = {"bucket_cap_mb": LARGE_BUCKETS}
    return {**found, **{name: {"process_group": group} for name, group in groups.items()}}


def measure_replicas(rank: Rank, name: str, groups: Mapping[str, Any]) -> None:
    """Measure training steps of a GPT of 125M parameters in eager mode."""
    size = rank.either(bench_gpt.SIZE, TINY)
    make = PlainLayer if name == "torch" else our_layer
    tokens = torch.randint(bench_gpt.VOCABULARY, (size.batch, size.sequence + 1), device=DEVICE)

    def model() -> GPT:
        return GPT(make, size, rank.either(bench_gpt.LAYERS, 2))

    steps: dict[str, Callable[[], None]] = {
        "one GPU": training_step(model(), tokens, name, group=rank.alone)
    }
    for way, options in wraps(groups).items():
        wrapped = DistributedDataParallel(model(), gradient_as_bucket_view=True, **options)
        reduces = way != "DDP that reduces nothing"
        wrapped.require_backward_grad_sync = reduces
        steps[way] = training_step(wrapped, tokens, name, group=None if reduces else rank.alone)
    times = rank.time_wall(steps, loops=6, calls=10, warmup=10)
    for row in over_one(rank, times):
        judged = {"bar": BAR} if row["way"] == "DDP" and name != "torch" else {}
        rank.row(op=f"125M GPT, DDP on {rank.count}, training step", case=name, **row, **judged)


def measure(rank: Rank) -> None:
    groups = groups_of(rank)
    for name in PRECISIONS:
        measure_replicas(rank, name, groups if name in PRECISIONS[1:3] else {})
        rank.free()
        rank.save()


if __name__ == "__main__":
    run_on_ranks("replicas", measure)
