"""Further costs of layers that two GPUs share: of the debugger's statistics, and of the host.

Statistics: `ratio` is the time of a step with all statistics divided by that of a step without the
debugger, under TP2 + SP. Host: the microseconds that each collective adds to the host time of
forward and backward of a layer.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bench_inspect import ALL, OPERANDS, Config, everywhere
from bench_parallel import collectives_alone
from contenders import Size, our_layer, random, step
from gpu_ranks import Rank, run_on_ranks
from torch import nn

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te

TINY = Size(hidden=64, ffn=128, heads=4, sequence=32, batch=1)
LARGE = Size(hidden=4096, ffn=16384, heads=32, sequence=4096, batch=4)
SMALL = Size(hidden=4096, ffn=16384, heads=32, sequence=2048, batch=2)
OF_THE_HOST = Size(hidden=256, ffn=1024, heads=4, sequence=64, batch=1)
LAYERS, STEPS, WARMUP, ROUNDS = 4, 10, 3, 9
MOST_FOR_STATISTICS, MOST_US = 1.04, 15.0
SESSIONS: dict[str, Config | None] = {
    "plain": None,
    "all statistics, every step": everywhere("LogTensorStats", tensors=OPERANDS, stats=ALL),
}


def shared_layer(size: Size, sequence: bool = True) -> nn.Module:
    """A tensor parallel layer, with `sequence` also sequence parallel."""
    return our_layer(
        size,
        attn_input_format="sbhd",
        tp_group=dist.group.WORLD,
        tp_size=dist.get_world_size(),
        set_parallel_mode=True,
        sequence_parallel=sequence,
    )


def block_ms(rank: Rank, run: Callable[[], None], config: Config | None, folder: str) -> float:
    """Milliseconds of a step on the slower rank: the mean of consecutive steps in one session."""
    synchronize = rank.either(torch.cuda.synchronize, int)
    steps, warmup = rank.either((STEPS, WARMUP), (1, 1))
    if config is not None:
        debug_api.initialize(config_file=config, log_dir=folder)
    for index in range(warmup + steps):
        if index == warmup:
            dist.barrier()
            synchronize()
            start = time.perf_counter()
        run()
        if config is not None:
            debug_api.step()
    synchronize()
    taken = (time.perf_counter() - start) * 1e3 / steps
    if config is not None:
        debug_api.end_debug()
    return max(rank.gathered(taken))


def measure_statistics(rank: Rank, size: Size) -> None:
    """Measure steps of layers in FP8, with the debugger and without."""
    layers = nn.Sequential(*(shared_layer(size) for _ in range(LAYERS)))
    x = random(size.sequence // rank.count, size.batch, size.hidden)
    run = step(layers, x, "fp8 delayed")
    times: dict[str, list[float]] = {name: [] for name in SESSIONS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(1 + rank.either(ROUNDS, 2)):
            for name, config in SESSIONS.items():
                taken = block_ms(rank, run, config, folder)
                if turn:  # the first round warms up
                    times[name].append(taken)
    for name, taken in times.items():
        ratios = [t / plain for t, plain in zip(taken, times["plain"], strict=True)]
        row: dict[str, Any] = {"ms": round(statistics.median(taken), 3)}
        row["ratio"] = round(statistics.median(ratios), 4)
        row["least"], row["most"] = round(min(ratios), 4), round(max(ratios), 4)
        if SESSIONS[name] is not None:
            row |= {"bar": MOST_FOR_STATISTICS, "better": "lower"}
        rank.row(op=f"{LAYERS} layers {size}, TP{rank.count} + SP, statistics", case=name, **row)


def collectives_of(run: Callable[[], None]) -> int:
    """The number of collectives that layers start in a step."""
    te.parallel_report(reset=True)
    run()
    return sum(calls for calls, _ in te.parallel_report(reset=True).counts.values())


def measure_host(rank: Rank, size: Size, name: str, sequence: bool) -> None:
    """Measure the host time of a shared layer, and of a layer that is as large as a rank's part.

    The difference is the host time of collectives. Of this, `torch_us` is the time of torch's own
    call of each collective.
    """
    head = size.hidden // size.heads
    part = Size(
        size.hidden, size.ffn // rank.count, size.heads // rank.count, size.sequence, size.batch
    )
    whole = {"attn_input_format": "sbhd", "kv_channels": head}
    x = random(size.sequence, size.batch, size.hidden)
    own = x.chunk(rank.count)[rank.number].contiguous() if sequence else x
    shared = step(shared_layer(size, sequence), own, name)
    # All contenders reduce amaxes; a model does that once for all layers, not in each layer.
    contenders = {
        "a rank's part": step(our_layer(part, **whole), x, name),
        "shared": shared,
        "torch": collectives_alone(shared),
    }
    times = rank.time_host(contenders, loops=60, calls=10, warmup=20)
    us = {way: timing.median_us for way, timing in times.items()}
    count = collectives_of(shared)
    added = (us["shared"] - us["a rank's part"]) / count
    rank.row(
        op=f"host time of a collective, TP{rank.count}{' + SP' if sequence else ''}",
        case=f"{size} {name}",
        us=round(us["shared"], 1),
        alone_us=round(us["a rank's part"], 1),
        collectives=count,
        added_us=round(added, 2),
        torch_us=round(us["torch"] / count, 2),
        ratio=round(added / MOST_US, 3),
        bar=1.0,
        better="lower",
    )


def measure(rank: Rank) -> None:
    for name in ("bf16", "fp8 delayed", "fp8 current"):
        for sequence in (True, False):
            measure_host(rank, rank.either(OF_THE_HOST, TINY), name, sequence)
    rank.save()
    for size in rank.either((LARGE, SMALL), (TINY,)):
        measure_statistics(rank, size)
        rank.save()
        rank.free()


if __name__ == "__main__":
    run_on_ranks("parallel_costs", measure)
