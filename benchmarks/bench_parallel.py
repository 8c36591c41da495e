"""Work that two GPUs share, beside half of what one GPU takes for all of it.

`ratio` is the time of the slower rank over half of one GPU's, which runs the backend that is chosen
for it. Each case is measured with all backends and with cuDNN alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from attention_cases import Call, Case
from contenders import DTYPE, RECIPES, Size, random
from harness import Report, Timing, over, require_gpu, time_gpu_each

import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import shard_sequence

RANKS = 2
OPS = ("context parallel forward", "context parallel forward + backward")
# Milliseconds of NVIDIA's TE 2.20.2 on two H200s, forward and backward by its ring; our bar.
CASES = {
    Case(1, 32, 32, 16384, 128, "causal"): (7.79, 1.05),
    Case(1, 32, 8, 32768, 128, "causal"): (27.83, 1.02),
}
# The same of transformer layers, tensor and sequence parallel, by precision.
LAYERS = {
    Size(4096, 16384, 32, 4096, 4): {
        "fp8 delayed": (13.49, 11.8),
        "fp8 current": (14.20, 12.4),
        "bf16": (20.25, 17.9),
    },
    Size(8192, 28672, 64, 4096, 1): {
        "fp8 delayed": (10.28, 9.3),
        "fp8 current": (11.02, 9.9),
        "bf16": (16.45, 14.9),
    },
}
WAYS = ("one GPU", "TP2 + SP")
COMM_TYPES = ("p2p", "all_gather", "a2a")
BACKENDS = {"any backend": {}, "cudnn": {"NVTE_FLASH_ATTN": "0"}}


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """These variables are set."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def calls(case: Case, comm_type: str | None, stream: bool = False) -> tuple[Call, Call]:
    """Forward, and forward with backward, on this rank; of whole sequences without a type."""
    group = None if comm_type is None else dist.group.WORLD
    torch.manual_seed(0)
    shapes = [(case.batch, case.sequence, n, case.size) for n in (case.heads, *[case.groups] * 2)]
    whole = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
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


def slower(times: dict[str, Timing]) -> dict[str, Timing]:
    """Of each contender, the timing of the slower rank."""
    ranks: list[dict[str, Timing]] = [{} for _ in range(RANKS)]
    dist.all_gather_object(ranks, times)
    return {name: max((r[name] for r in ranks), key=lambda t: t.median_us) for name in times}


def measure_context(report: Report | None, case: Case, nvidia: float, bar: float) -> None:
    """Attention of two ranks that share sequences."""
    for name, variables in BACKENDS.items():
        with environment(variables):
            pairs = {"one GPU": calls(case, None)}
            pairs.update({comm_type: calls(case, comm_type) for comm_type in COMM_TYPES})
            pairs["p2p, cp_stream"] = calls(case, "p2p", stream=True)
            for i, op in enumerate(OPS):
                contenders = {contender: pair[i] for contender, pair in pairs.items()}
                times = slower(time_gpu_each(contenders, repeats=15, warmup=6, cold=False))
                if report is None:
                    continue
                half = times.pop("one GPU").median_us / RANKS
                for contender, timing in times.items():
                    whole = i == 1 and contender == "p2p"
                    more = {"bar": bar, "better": "lower", "nvidia_ms": nvidia} if whole else {}
                    row = {**over(timing, half), "half_ms": round(half / 1e3, 3), **more}
                    report.row(op=op, case=f"{case} {contender}, {name}", **row)
        torch.cuda.empty_cache()


def layer_step(size: Size, name: str, shared: bool) -> Call:
    """One forward and backward of a layer, alone or on this rank."""
    ranks = {"tp_group": dist.group.WORLD, "tp_size": RANKS, "sequence_parallel": True}
    ranks["ub_tp_comm_overlap"] = True
    layer = te.TransformerLayer(
        *(size.hidden, size.ffn, size.heads),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        params_dtype=DTYPE,
        device="cuda",
        **({**ranks, "set_parallel_mode": True} if shared else {}),
    )
    tokens = size.sequence // (RANKS if shared else 1)
    x = random(tokens, size.batch, size.hidden).requires_grad_()
    leaves, upstream, recipe = [x, *layer.parameters()], torch.randn_like(x), RECIPES[name]
    group = dist.group.WORLD if shared else None

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe, fp8_group=group):
            y = layer(x)
        y.backward(upstream)

    return run


def measure_layers(report: Report | None, size: Size) -> None:
    """Transformer layers that two ranks share."""
    for name, (nvidia, bar) in LAYERS[size].items():
        contenders = {shared: layer_step(size, name, shared == "TP2 + SP") for shared in WAYS}
        times = slower(time_gpu_each(contenders, repeats=15, warmup=6, cold=False))
        if report is not None:
            half = times["one GPU"].median_us / RANKS
            more = {"bar_ms": bar, "nvidia_ms": nvidia, "half_ms": round(half / 1e3, 3)}
            row = {**over(times["TP2 + SP"], half), **more}
            report.row(op="layer, TP2 + SP, forward + backward", case=f"{size} {name}", **row)
        del contenders
        torch.cuda.empty_cache()


def run(rank: int, store: str) -> None:
    """What a rank measures; rank 0 reports."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        *("nccl", f"file://{store}"),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(minutes=5),
        device_id=torch.device("cuda", rank),
    )
    report = Report("parallel") if rank == 0 else None
    te.initialize_ub([max(s.sequence * s.batch for s in LAYERS), 8192], RANKS)
    for size in LAYERS:
        measure_layers(report, size)
        if report is not None:
            report.save()
    for case, (nvidia, bar) in CASES.items():
        measure_context(report, case, nvidia, bar)
    if report is not None:
        report.save()
    dist.destroy_process_group()


def main() -> None:
    require_gpu()
    if torch.cuda.device_count() < RANKS:
        raise SystemExit(f"{RANKS} GPUs are needed, got {torch.cuda.device_count()}")
    with TemporaryDirectory() as folder:
        mp.spawn(run, (f"{folder}/store",), nprocs=RANKS)


if __name__ == "__main__":
    main()
