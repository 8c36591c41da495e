"""Runs a benchmark on several GPUs, with a process for each.

    from gpu_ranks import Rank, run_on_ranks

    def measure(rank: Rank) -> None: ...

    if __name__ == "__main__":
        run_on_ranks("replicas", measure)

`python bench_<what>.py` measures on two GPUs, with `--ranks 4` on four, whose results are in a
separate file. `--dry-run` tests the code in processes without GPUs, with tiny sizes and few
repeats. It writes nothing, and the times that it prints mean nothing.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping
from datetime import timedelta
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import (
    Call,
    Report,
    Timing,
    require_gpu,
    time_gpu_each,
    time_host_each,
    time_wall_each,
)

ONCE = {"loops": 2, "calls": 1, "warmup": 1}  # repeats of a dry run
T = TypeVar("T")


class Rank:
    """A rank of a benchmark, which measures together with the others.

    Attributes:
        number: number of this rank.
        count: number of all ranks, a power of two.
        report: the report, on the first rank; None on the others.
        dry: whether this is a dry run, without GPUs.
        groups: process groups of this rank and its neighbours, by the number of ranks.
        alone: the process group that has only this rank.
    """

    def __init__(self, number: int, name: str, dry: bool) -> None:
        self.number, self.count, self.dry = number, dist.get_world_size(), dry
        self.report = Report(name) if number == 0 else None
        self.groups = self.neighbours()
        self.alone = self.groups[1]
        self._one = torch.zeros(1, device="cpu" if dry else "cuda")

    def neighbours(self, backend: str | None = None) -> dict[int, Any]:
        """Make groups of 1, 2, 4, ... ranks; returns those with this rank, by number of ranks."""
        found, ranks = {}, 1
        while ranks <= self.count:
            members = [[*range(i, i + ranks)] for i in range(0, self.count, ranks)]
            groups = [dist.new_group(some, backend=backend) for some in members]
            found[ranks] = groups[self.number // ranks]
            ranks *= 2
        return found

    def either(self, real: T, tiny: T) -> T:
        """`real` in a measurement, `tiny` in a dry run."""
        return tiny if self.dry else real

    def row(self, **fields: Any) -> None:
        """Add a row to the report, on the first rank only."""
        if self.report is not None:
            self.report.row(**fields)

    def save(self) -> None:
        """Write the rows so far, except in a dry run."""
        if self.report is not None and not self.dry:
            self.report.save()

    def free(self) -> None:
        """Free the memory of objects that are no longer used."""
        gc.collect()  # wrappers of modules are reference cycles
        if not self.dry:
            torch.cuda.empty_cache()

    def meet(self) -> None:
        """Let the GPUs wait for each other, but not the hosts."""
        dist.all_reduce(self._one)

    def slower(self, times: dict[str, Timing]) -> dict[str, Timing]:
        """For each contender, the timing of the slowest rank."""
        ranks = self.gathered(times)
        return {name: max((r[name] for r in ranks), key=lambda t: t.median_us) for name in times}

    def gathered(self, found: T) -> list[T]:
        """The values of `found` on all ranks."""
        ranks: list[Any] = [None] * self.count
        dist.all_gather_object(ranks, found)
        return ranks

    def time_gpu(self, contenders: Mapping[str, Call], **how: Any) -> dict[str, Timing]:
        """`time_gpu_each`, with the timing of the slowest rank."""
        if self.dry:
            return self.time_wall(contenders)
        return self.slower(time_gpu_each(contenders, cold=False, meet=self.meet, **how))

    def time_wall(self, contenders: Mapping[str, Call], **how: int) -> dict[str, Timing]:
        """`time_wall_each`, with the timing of the slowest rank."""
        return self.slower(time_wall_each(contenders, meet=dist.barrier, **self.either(how, ONCE)))

    def time_host(self, contenders: Mapping[str, Call], **how: int) -> dict[str, Timing]:
        """`time_host_each`, with the timing of the slowest rank."""
        return self.slower(time_host_each(contenders, meet=dist.barrier, **self.either(how, ONCE)))


def run_on_ranks(name: str, measure: Callable[[Rank], None]) -> None:
    """Run `measure` in a process for each GPU, and save the report of the first rank.

    `measure` must be a function of a module, because the processes import it.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dry-run", action="store_true")
    asked, _ = parser.parse_known_args()
    count, dry = asked.ranks, asked.dry_run
    if not dry:
        require_gpu()
        if torch.cuda.device_count() < count:
            raise SystemExit(f"{count} GPUs are needed, got {torch.cuda.device_count()}")
    with TemporaryDirectory() as folder:
        name = name if count == 2 else f"{name}_{count}"
        mp.spawn(_run, (count, name, measure, dry, f"{folder}/store"), nprocs=count)


def _run(
    number: int, count: int, name: str, measure: Callable[[Rank], None], dry: bool, store: str
) -> None:
    more: dict[str, Any] = {}
    if not dry:
        torch.cuda.set_device(number)
        more["device_id"] = torch.device("cuda", number)
    dist.init_process_group(
        *("gloo" if dry else "nccl", f"file://{store}"),
        rank=number,
        world_size=count,
        timeout=timedelta(minutes=5),
        **more,
    )
    rank = Rank(number, name, dry)
    measure(rank)
    rank.save()
    dist.barrier()
    dist.destroy_process_group()
