"""Attention under context parallelism, relative to one GPU's time divided by the ranks.

    bench_context_parallel.py             two GPUs
    bench_context_parallel.py --ranks 4   four

`ratio` is the time of the slowest rank divided by one GPU's share: the time of one GPU for all
sequences, with the backend that it chooses, divided by the number of ranks. Each case is measured
with all backends, with cuDNN only, and in FP8 (`fp8_dpa`); then the time of one GPU is in FP8, too.
"""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from attention_cases import Call, Case
from contenders import DEVICE, DTYPE
from gpu_ranks import Rank, run_on_ranks
from harness import over

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.distributed import shard_sequence

OPS = ("context parallel forward", "context parallel forward + backward")
# By the number of ranks: milliseconds of NVIDIA's TE 2.20.2 on H200s for forward and backward with
# its ring, and our bar. The bars of four ranks are 4.2 and 13.9 ms, for shares of 3.4 and 13.2 ms.
Goals = dict[int, tuple[float, float]]
CASES: dict[Case, Goals] = {
    Case(1, 32, 32, 16384, 128, "causal"): {2: (7.79, 1.05), 4: (6.68, 1.24)},
    Case(1, 32, 8, 32768, 128, "causal"): {2: (27.83, 1.02), 4: (14.92, 1.05)},
}
TINY: dict[Case, Goals] = {Case(1, 4, 4, 64, 16, "causal"): {2: (1.0, 1.0), 4: (1.0, 1.0)}}
COMM_TYPES = ("p2p", "all_gather", "a2a")
PAIRS = "a2a+p2p"  # with four ranks: pairs of neighbours exchange heads
# Environment variables, and whether attention runs in FP8.
WAYS: dict[str, tuple[dict[str, str], bool]] = {
    "any backend": ({}, False),
    "cudnn": ({"NVTE_FLASH_ATTN": "0"}, False),
    "FP8": ({}, True),
}
RECIPE = DelayedScaling(fp8_dpa=True)


def calls(case: Case, comm_type: str | None, group: Any, fp8: bool = False) -> tuple[Call, Call]:
    """Forward, and forward + backward, on this rank; `comm_type` None is for whole sequences."""
    ranks = None if comm_type is None else dist.group.WORLD
    torch.manual_seed(0)
    shapes = [(case.batch, case.sequence, n, case.size) for n in (case.heads, *[case.groups] * 2)]
    whole = [torch.randn(shape, device=DEVICE, dtype=DTYPE) for shape in shapes]
    inputs = [shard_sequence(x, ranks, 1).requires_grad_() for x in whole]
    module = te.DotProductAttention(
        *(case.heads, case.size, case.groups), qkv_format="bshd", attn_mask_type=case.mask
    )
    if comm_type is not None:
        module.set_context_parallel_group(group, None, None, comm_type)

    def forward() -> torch.Tensor:
        with te.fp8_autocast(fp8, fp8_recipe=RECIPE):
            return module(*inputs)

    upstream = torch.randn_like(forward())
    return forward, lambda: torch.autograd.grad(forward(), inputs, upstream)


def pair_groups(rank: Rank) -> list[Any]:
    """The group of this rank's pair, and of the ranks at the same position in all pairs."""
    rings = [dist.new_group([*range(i, rank.count, 2)]) for i in range(2)]
    return [rank.groups[2], rings[rank.number % 2]]


def measure_context(rank: Rank, case: Case, goals: Goals, groups: dict[str, Any]) -> None:
    """Measure attention of ranks that share sequences.

    Args:
        groups: the process group (or pair of groups) for each type of communication.
    """
    nvidia, bar = goals[rank.count]
    for name, (variables, fp8) in WAYS.items():
        with patch.dict(os.environ, variables):
            pairs = {"one GPU": calls(case, None, None, fp8=fp8)}
            for kind, group in groups.items():
                pairs[kind] = calls(case, kind, group, fp8=fp8)
            for i, op in enumerate(OPS):
                contenders = {contender: pair[i] for contender, pair in pairs.items()}
                times = rank.time_gpu(contenders, repeats=15, warmup=6)
                share = times.pop("one GPU").median_us / rank.count
                for contender, timing in times.items():
                    whole = i == 1 and contender == "p2p" and not fp8
                    more = {"bar": bar, "better": "lower", "nvidia_ms": nvidia} if whole else {}
                    row = {**over(timing, share), "share_ms": round(share / 1e3, 3), **more}
                    rank.row(op=op, case=f"{case} {contender}, {name}", **row)
        rank.free()


def measure(rank: Rank) -> None:
    groups: dict[str, Any] = dict.fromkeys(COMM_TYPES, dist.group.WORLD)
    if rank.count > 2:
        groups[PAIRS] = pair_groups(rank)
    for case, goals in rank.either(CASES, TINY).items():
        measure_context(rank, case, goals, groups)
        rank.save()


if __name__ == "__main__":
    run_on_ranks("context_parallel", measure)
