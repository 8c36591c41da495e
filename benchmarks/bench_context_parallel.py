"""Attention of sequences that two GPUs share, beside half of what one GPU takes for all of it.

`ratio` is the time of the slower rank over half of one GPU's, which runs the backend that is chosen
for it. Each case is measured with all backends and with cuDNN alone.
"""

from __future__ import annotations

import os
from unittest.mock import patch

import torch
import torch.distributed as dist
from attention_cases import Call, Case
from contenders import DEVICE, DTYPE
from harness import over
from two_gpus import RANKS, Rank, run_on_ranks

import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import shard_sequence

OPS = ("context parallel forward", "context parallel forward + backward")
# Milliseconds of NVIDIA's TE 2.20.2 on two H200s, forward and backward by its ring; our bar.
CASES = {
    Case(1, 32, 32, 16384, 128, "causal"): (7.79, 1.05),
    Case(1, 32, 8, 32768, 128, "causal"): (27.83, 1.02),
}
COMM_TYPES = ("p2p", "all_gather", "a2a")
BACKENDS = {"any backend": {}, "cudnn": {"NVTE_FLASH_ATTN": "0"}}


def calls(case: Case, comm_type: str | None, stream: bool = False) -> tuple[Call, Call]:
    """Forward, and forward with backward, on this rank; of whole sequences without a type."""
    group = None if comm_type is None else dist.group.WORLD
    torch.manual_seed(0)
    shapes = [(case.batch, case.sequence, n, case.size) for n in (case.heads, *[case.groups] * 2)]
    whole = [torch.randn(shape, device=DEVICE, dtype=DTYPE) for shape in shapes]
    inputs = [shard_sequence(x, group, 1).requires_grad_() for x in whole]
    module = te.DotProductAttention(
        *(case.heads, case.size, case.groups), qkv_format="bshd", attn_mask_type=case.mask
    )
    if comm_type is not None:
        side = torch.cuda.Stream() if stream else None
        module.set_context_parallel_group(group, None, side, comm_type)

    def forward() -> torch.Tensor:
        return module(*inputs)

    upstream = torch.randn_like(forward())
    return forward, lambda: torch.autograd.grad(forward(), inputs, upstream)


def measure_context(rank: Rank, case: Case, nvidia: float, bar: float) -> None:
    """Attention of two ranks that share sequences."""
    for name, variables in BACKENDS.items():
        with patch.dict(os.environ, variables):
            pairs = {"one GPU": calls(case, None)}
            pairs.update({comm_type: calls(case, comm_type) for comm_type in COMM_TYPES})
            if not rank.dry:
                pairs["p2p, cp_stream"] = calls(case, "p2p", stream=True)
            for i, op in enumerate(OPS):
                contenders = {contender: pair[i] for contender, pair in pairs.items()}
                times = rank.time_gpu(contenders, repeats=15, warmup=6)
                half = times.pop("one GPU").median_us / RANKS
                for contender, timing in times.items():
                    whole = i == 1 and contender == "p2p"
                    more = {"bar": bar, "better": "lower", "nvidia_ms": nvidia} if whole else {}
                    row = {**over(timing, half), "half_ms": round(half / 1e3, 3), **more}
                    rank.row(op=op, case=f"{case} {contender}, {name}", **row)
        rank.free()


def measure(rank: Rank) -> None:
    cases = rank.either(CASES, {Case(1, 4, 4, 64, 16, "causal"): (1.0, 1.0)})
    for case, (nvidia, bar) in cases.items():
        measure_context(rank, case, nvidia, bar)
        rank.save()


if __name__ == "__main__":
    run_on_ranks("context_parallel", measure)
