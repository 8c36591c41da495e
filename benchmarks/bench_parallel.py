"""Layers that two GPUs share, beside half of what one GPU takes for the whole layer.

`ratio` is the time of the slower rank over half of one GPU's.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from attention_cases import Call
from contenders import DEVICE, DTYPE, Size, our_layer, random, step
from harness import over
from two_gpus import RANKS, Rank, run_on_ranks

import transformer_engine.pytorch as te
from transformer_engine.pytorch.parallel.collectives import gather_into, scatter_into

# Of transformer layers, tensor and sequence parallel, by precision: NVIDIA's TE 2.20.2, our bar,
# and half of one GPU's time on the machine that both are for; GPUs differ by some percent.
Goals = dict[str, tuple[float, float, float]]
LAYERS: dict[Size, Goals] = {
    Size(4096, 16384, 32, 4096, 4): {
        "fp8 delayed": (13.49, 11.8, 10.7),
        "fp8 current": (14.20, 12.4, 11.2),
        "bf16": (20.25, 17.9, 16.4),
    },
    Size(8192, 28672, 64, 4096, 1): {
        "fp8 delayed": (10.28, 9.3, 8.8),
        "fp8 current": (11.02, 9.9, 9.2),
        "bf16": (16.45, 14.9, 14.1),
    },
}
WAYS = ("one GPU", "TP2 + SP")


def layer_step(rank: Rank, size: Size, name: str, shared: bool) -> Call:
    """One forward and backward of a layer, alone or on this rank."""
    group = dist.group.WORLD if shared else rank.alone
    ranks = {"tp_group": group, "tp_size": RANKS, "sequence_parallel": True}
    ranks |= {"set_parallel_mode": True, "ub_tp_comm_overlap": True}
    layer = our_layer(size, attn_input_format="sbhd", **(ranks if shared else {}))
    tokens = size.sequence // (RANKS if shared else 1)
    return step(layer, random(tokens, size.batch, size.hidden), name, group)


def collectives_alone(step: Call) -> Call:
    """The collectives of a step, one after the other, with nothing beside them."""
    te.parallel_report(reset=True)
    step()
    calls: list[Call] = []
    for sent, (count, nbytes) in te.parallel_report(reset=True).counts.items():
        own = torch.zeros(nbytes // count // DTYPE.itemsize, device=DEVICE, dtype=DTYPE)
        if sent.collective == "all-reduce":
            calls += [partial(dist.all_reduce, own, async_op=True)] * count
            continue
        gathers = sent.collective == "all-gather"
        other = own.new_zeros(own.numel() * RANKS if gathers else own.numel() // RANKS)
        move = gather_into if gathers else scatter_into
        calls += [partial(move, other, own, async_op=True)] * count

    def run() -> None:
        for call in calls:
            call().wait()

    return run


def measure_layers(rank: Rank, size: Size, goals: Goals) -> None:
    """Transformer layers that two ranks share."""
    for name, (nvidia, bar_ms, its_half) in goals.items():
        contenders = {shared: layer_step(rank, size, name, shared == "TP2 + SP") for shared in WAYS}
        contenders["alone"] = collectives_alone(contenders["TP2 + SP"])
        times = rank.time_gpu(contenders, repeats=15, warmup=6)
        half = times["one GPU"].median_us / RANKS
        more = {"bar": round(bar_ms / its_half, 3), "better": "lower", "nvidia_ms": nvidia}
        more["half_ms"] = round(half / 1e3, 3)
        more["alone_ms"] = round(times["alone"].median_us / 1e3, 3)  # of its collectives
        row = {**over(times["TP2 + SP"], half), **more}
        rank.row(op="layer, TP2 + SP, forward + backward", case=f"{size} {name}", **row)
        del contenders
        rank.free()


def measure(rank: Rank) -> None:
    layers = rank.either(LAYERS, {Size(64, 128, 4, 32, 1): next(iter(LAYERS.values()))})
    te.initialize_ub(
        [max(s.sequence * s.batch for s in layers), max(s.hidden for s in layers)], RANKS
    )
    for size, goals in layers.items():
        measure_layers(rank, size, goals)
        rank.save()


if __name__ == "__main__":
    run_on_ranks("parallel", measure)
