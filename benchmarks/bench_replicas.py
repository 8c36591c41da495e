"""Two GPUs that train one model on data of their own: replicas of it, and shards.

`ratio` is tokens a second of two GPUs over those of one, which trains the same model on as many
tokens as each of the two, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import bench_gpt
import contenders
import torch
from bench_gpt import GPT, training_step
from contenders import DEVICE, Size, our_layer, random, step
from harness import Timing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from two_gpus import RANKS, Rank, run_on_ranks

import transformer_engine.pytorch as te

TINY = Size(hidden=64, ffn=128, heads=4, sequence=32, batch=1)
LARGE = Size(hidden=4096, ffn=16384, heads=32, sequence=4096, batch=4)
SMALL = Size(hidden=4096, ffn=16384, heads=32, sequence=2048, batch=2)
SIZES = {"fp8 delayed": (LARGE, SMALL), "fp8 current": (LARGE,)}
LAYERS = 12
PRECISIONS = ("bf16", "fp8 delayed", "fp8 current")
BAR = 1.9
LARGEST_SHARE = 0.505  # of the bytes that bf16 weights take; norms and biases are not in FP8
OF_LARGE_STEPS = {"loops": 7, "calls": 1, "warmup": 3}
Steps = dict[str, Callable[[], None]]


def over_one(times: Mapping[str, Timing], bar: float | None = None) -> list[dict[str, Any]]:
    """Rows of two GPUs, over one."""
    one = times["one GPU"].median_us
    rows = []
    for name, timing in times.items():
        gpus = 1 if name == "one GPU" else RANKS
        row = {"way": name, "ms": round(timing.median_us / 1e3, 3)}
        row |= {"ratio": round(gpus * one / timing.median_us, 3)}
        row |= {"p10_us": round(timing.p10_us, 1), "p90_us": round(timing.p90_us, 1)}
        rows.append({**row, "bar": bar} if bar is not None and gpus == RANKS else row)
    return rows


def unsynchronised(model: DistributedDataParallel) -> DistributedDataParallel:
    """One that reduces no gradients, and does all else."""
    model.require_backward_grad_sync = False
    return model


def measure_replicas(rank: Rank, name: str) -> None:
    """Training steps of a GPT of 125M parameters, eager."""
    size = rank.either(bench_gpt.SIZE, TINY)
    model = lambda: GPT(our_layer, size, rank.either(bench_gpt.LAYERS, 2))  # noqa: E731
    wrapped = lambda: DistributedDataParallel(model(), gradient_as_bucket_view=True)  # noqa: E731
    tokens = torch.randint(bench_gpt.VOCABULARY, (size.batch, size.sequence + 1), device=DEVICE)
    steps: Steps = {
        "one GPU": training_step(model(), tokens, name, group=rank.alone),
        "DDP": training_step(wrapped(), tokens, name),
        "DDP that reduces nothing": training_step(
            unsynchronised(wrapped()), tokens, name, group=rank.alone
        ),
    }
    times = rank.time_wall(steps, loops=6, calls=10, warmup=10)
    for row in over_one(times):
        judged = {"bar": BAR} if row["way"] == "DDP" else {}
        rank.row(op="125M GPT, DDP on 2, training step", case=name, **row, **judged)


class Gathered(TorchDispatchMode):
    """Counts bytes that this rank gives to all-gathers inside."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in func._schema.name:
            self.bytes += [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)][-1].nbytes
        return func(*args, **(kwargs or {}))


def stack(size: Size, layers: int, name: str, fp8_weights: bool, sharded: bool) -> nn.Module:
    """Layers, each a shard of its own."""
    with te.quantized_model_init(fp8_weights, recipe=contenders.RECIPES[name]):
        model = nn.Sequential(*(our_layer(size) for _ in range(layers)))
    if sharded:
        mesh = init_device_mesh(DEVICE, (RANKS,))
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
    return model


def gathered_bytes(size: Size, name: str, fp8_weights: bool) -> int:
    """What a rank gives so that all have the weights of a layer once."""
    model = stack(size, 1, name, fp8_weights, sharded=True)
    with Gathered() as found:
        model[0].unshard()  # type: ignore[operator]
    model[0].reshard()  # type: ignore[operator]
    return found.bytes


def measure_shards(rank: Rank, size: Size, name: str) -> None:
    """Forward and backward of layers with FP8 weights that two GPUs share, and their optimizer."""
    layers = rank.either(LAYERS, 2)
    x = random(size.batch, size.sequence, size.hidden)
    models = {
        "one GPU": stack(size, layers, name, fp8_weights=True, sharded=False),
        "FSDP2": stack(size, layers, name, fp8_weights=True, sharded=True),
    }
    groups = {"one GPU": rank.alone, "FSDP2": None}
    steps = {way: step(model, x, name, groups[way]) for way, model in models.items()}
    op = f"{layers} layers {size}, FSDP2 on 2, FP8 weights"
    for row in over_one(rank.time_wall(steps, **OF_LARGE_STEPS), BAR):
        rank.row(op=f"{op}, forward + backward", case=name, **row)
    adams = {
        way: te.optimizers.FusedAdam(model.parameters(), lr=1e-5, master_weights=True)
        for way, model in models.items()
    }

    def training(way: str) -> Callable[[], None]:
        def run() -> None:
            steps[way]()
            adams[way].step()

        return run

    trainings = {way: training(way) for way in models}
    for row in over_one(rank.time_wall(trainings, **OF_LARGE_STEPS), BAR):
        rank.row(op=f"{op}, with FusedAdam", case=name, **row)


def measure_bytes(rank: Rank, size: Size, name: str) -> None:
    """Bytes gathered for the weights of a layer, over those of bf16 weights."""
    found = {fp8: gathered_bytes(size, name, fp8) for fp8 in (False, True)}
    row = {"mib": round(found[True] / 2**20, 2), "ratio": round(found[True] / found[False], 4)}
    row |= {"bar": LARGEST_SHARE, "better": "lower"}
    rank.row(op=f"layer {size}, FSDP2 on 2, bytes gathered", case=f"{name}, FP8 weights", **row)


def measure(rank: Rank) -> None:
    for name in PRECISIONS:
        measure_replicas(rank, name)
        rank.free()
    rank.save()
    for name, sizes in SIZES.items():
        measure_bytes(rank, rank.either(LARGE, TINY), name)
        for size in rank.either(sizes, (TINY,)):
            measure_shards(rank, size, name)
            rank.free()
            rank.save()


if __name__ == "__main__":
    run_on_ranks("replicas", measure)
