"""The processes of a benchmark that several GPUs share, one for each.

    from gpu_ranks import Rank, run_on_ranks

    def measure(rank: Rank) -> None: ...

    if __name__ == "__main__":
        run_on_ranks("replicas", measure)

`python bench_<what>.py` measures on two GPUs, with `--ranks 4` on four, whose results have a file
of their own. `--dry-run` runs the same code on processes without GPUs, with tiny sizes and few
repeats, and writes nothing: what it prints says only that the code runs.
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

ONCE = {"loops": 2, "calls": 1, "warmup": 1}  # of a dry run
T = TypeVar("T")


class Rank:
    """What a process measures together with the others.

    Attributes:
        number: of this rank.
        count: of all ranks, a power of two.
        report: of the first rank; None on the others.
        dry: there are no GPUs, and nothing is measured.
        groups: of this rank and its neighbours, by the number of their ranks.
        alone: the group of this rank alone.
    """

    def __init__(self, number: int, name: str, dry: bool) -> None:
        self.number, self.count, self.dry = number, dist.get_world_size(), dry
        self.report = Report(name) if number == 0 else None
        self.groups = self.neighbours()
        self.alone = self.groups[1]
        self._one = torch.zeros(1, device="cpu" if dry else "cuda")

    def neighbours(self, backend: str | None = None) -> dict[int, Any]:
        """New groups that have this rank as a member, by the number of their ranks."""
        found, ranks = {}, 1
        while ranks <= self.count:
            members = [[*range(i, i + ranks)] for i in range(0, self.count, ranks)]
            groups = [dist.new_group(some, backend=backend) for some in members]
            found[ranks] = groups[self.number // ranks]
            ranks *= 2
        return found

    def either(self, real: T, tiny: T) -> T:
        """What is measured, or what a dry run has instead."""
        return tiny if self.dry else real

    def row(self, **fields: Any) -> None:
        """One measurement, once."""
        if self.report is not None:
            self.report.row(**fields)

    def save(self) -> None:
        """Writes the rows so far, unless they say nothing."""
        if self.report is not None and not self.dry:
            self.report.save()

    def free(self) -> None:
        """Gives back the memory of what is gone."""
        gc.collect()  # wrappers of modules hold themselves
        if not self.dry:
            torch.cuda.empty_cache()

    def meet(self) -> None:
        """The GPUs wait for each other; their hosts do not."""
        dist.all_reduce(self._one)

    def slower(self, times: dict[str, Timing]) -> dict[str, Timing]:
        """Of each contender, the timing of the slower rank."""
        ranks = self.gathered(times)
        return {name: max((r[name] for r in ranks), key=lambda t: t.median_us) for name in times}

    def gathered(self, found: T) -> list[T]:
        """What each rank has found."""
        ranks: list[Any] = [None] * self.count
        dist.all_gather_object(ranks, found)
        return ranks

    def time_gpu(self, contenders: Mapping[str, Call], **how: Any) -> dict[str, Timing]:
        """As `time_gpu_each`, of the slower rank."""
        if self.dry:
            return self.time_wall(contenders)
        return self.slower(time_gpu_each(contenders, cold=False, meet=self.meet, **how))

    def time_wall(self, contenders: Mapping[str, Call], **how: int) -> dict[str, Timing]:
        """As `time_wall_each`, of the slower rank."""
        return self.slower(time_wall_each(contenders, meet=dist.barrier, **self.either(how, ONCE)))

    def time_host(self, contenders: Mapping[str, Call], **how: int) -> dict[str, Timing]:
        """As `time_host_each`, of the slower rank."""
        return self.slower(time_host_each(contenders, meet=dist.barrier, **self.either(how, ONCE)))


def run_on_ranks(name: str, measure: Callable[[Rank], None]) -> None:
    """Measures in one process for each GPU, and saves what the first reports.

    `measure` is a function of a module, which processes import.
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
