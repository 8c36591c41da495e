"""Two GPUs that shard the weights of a model, and gather them in FP8 (FSDP2).

`ratio` is the tokens per second of two GPUs divided by those of one GPU, which trains the same
model on as many tokens as each of the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import contenders
import torch
import torch.distributed as dist
from bench_replicas import over_one
from contenders import DEVICE, Size, our_layer, random, step
from gpu_ranks import Rank, run_on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import transformer_engine.pytorch as te

TINY = Size(hidden=64, ffn=128, heads=4, sequence=32, batch=1)
LARGE = Size(hidden=4096, ffn=16384, heads=32, sequence=4096, batch=4)
SMALL = Size(hidden=4096, ffn=16384, heads=32, sequence=2048, batch=2)
SIZES = {"fp8 delayed": (LARGE, SMALL), "fp8 current": (LARGE,)}
LAYERS = 12
BAR = 1.9
LARGEST_SHARE = 0.505  # of the bytes of bf16 weights; norms and biases are not in FP8
OF_LARGE_STEPS = {"loops": 7, "calls": 1, "warmup": 3}


class Gathered(TorchDispatchMode):
    """Counts the bytes that this rank sends in all-gathers, as a context manager."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in func._schema.name:
            self.bytes += [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)][-1].nbytes
        return func(*args, **(kwargs or {}))


def stack(size: Size, layers: int, name: str, fp8_weights: bool, sharded: bool) -> nn.Module:
    """A stack of layers; if `sharded`, `fully_shard` is applied to each of them."""
    with te.quantized_model_init(fp8_weights, recipe=contenders.RECIPES[name]):
        model = nn.Sequential(*(our_layer(size) for _ in range(layers)))
    if sharded:
        mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
    return model


def gathered_bytes(size: Size, name: str, fp8_weights: bool) -> int:
    """Bytes that a rank sends to gather the weights of a layer once."""
    model = stack(size, 1, name, fp8_weights, sharded=True)
    with Gathered() as found:
        model[0].unshard()  # type: ignore[operator]
    model[0].reshard()  # type: ignore[operator]
    return found.bytes


def measure_shards(rank: Rank, size: Size, name: str) -> None:
    """Measure layers with sharded FP8 weights: forward + backward, without and with optimizer."""
    layers = rank.either(LAYERS, 2)
    x = random(size.batch, size.sequence, size.hidden)
    models = {
        "one GPU": stack(size, layers, name, fp8_weights=True, sharded=False),
        "FSDP2": stack(size, layers, name, fp8_weights=True, sharded=True),
    }
    groups = {"one GPU": rank.alone, "FSDP2": None}
    steps = {way: step(model, x, name, groups[way]) for way, model in models.items()}
    op = f"{layers} layers {size}, FSDP2 on {rank.count}, FP8 weights"
    for row in over_one(rank, rank.time_wall(steps, **OF_LARGE_STEPS), BAR):
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
    for row in over_one(rank, rank.time_wall(trainings, **OF_LARGE_STEPS), BAR):
        rank.row(op=f"{op}, with FusedAdam", case=name, **row)


def measure_bytes(rank: Rank, size: Size, name: str) -> None:
    """Measure the bytes gathered for the weights of a layer, relative to bf16 weights."""
    found = {fp8: gathered_bytes(size, name, fp8) for fp8 in (False, True)}
    row = {"mib": round(found[True] / 2**20, 2), "ratio": round(found[True] / found[False], 4)}
    row |= {"bar": LARGEST_SHARE, "better": "lower"}
    op = f"layer {size}, FSDP2 on {rank.count}, bytes gathered"
    rank.row(op=op, case=f"{name}, FP8 weights", **row)


def measure(rank: Rank) -> None:
    for name, sizes in SIZES.items():
        measure_bytes(rank, rank.either(LARGE, TINY), name)
        for size in rank.either(sizes, (TINY,)):
            measure_shards(rank, size, name)
            rank.free()
            rank.save()


if __name__ == "__main__":
    run_on_ranks("shards", measure)
