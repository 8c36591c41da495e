"""Searches cuBLASLt algorithms for GEMMs, and writes csrc/cuda/policy/gemm_table.inc.

    PYTHONPATH=. python benchmarks/tune_gemm.py [--out FILE] [--seconds PER_PRODUCT]
        [--precision bf16 | fp8 | "fp8 blocks"]... [--layer h768 | TP2]... [--adding]

For each GEMM of gemm_cases.py, the search times the algorithms of cuBLASLt's heuristic, then climbs
from the best one through similar algorithms until the time is up. The fastest correct algorithms
are then timed in turns with the first guess of the heuristic. If the winner takes at most `KEEP` of
the time of the first guess, it gets a row in the table. If not, FP8 GEMMs of the forward get a row
without an algorithm, because they would otherwise use the algorithm of the nearest row
(csrc/cuda/policy/gemm_table.h). Nothing is tuned in training: the table is compiled in.

GEMMs are timed in CUDA graphs, one after the other, as they run in a model.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gemm_cases import Calls, Case, cases, prepare
from harness import Report, captured, require_gpu, time_gpu_each

from transformer_engine import _C

TABLE = Path(__file__).parent.parent / "csrc/cuda/policy/gemm_table.inc"
GUESSES = 24
FINALISTS = 4
CALLS = 10  # calls in a CUDA graph
KEEP = 0.99

Algorithm = tuple[int, ...]


@dataclass(frozen=True)
class Tuned:
    """The result for a GEMM; `algorithm` is None if the first guess stays."""

    problem: str
    algorithm: Algorithm | None
    us: float
    guess_us: float
    torch_us: float | None
    tried: int

    @property
    def is_forward(self) -> bool:
        """Whether the problem has fast accumulation, which only FP8 GEMMs of the forward have."""
        return self.problem.split(", ")[8].startswith("true")

    @property
    def row(self) -> str:
        if self.algorithm is None:
            return f"{{{self.problem}, {{}}}},  // {self.guess_us:.1f} us, the first guess"
        numbers = ", ".join(map(str, self.algorithm))
        return f"{{{self.problem}, {{{numbers}}}}},  // {self.us:.1f} us, was {self.guess_us:.1f}"


def tune(case: Case, seconds: float) -> Tuned:
    """Search the best algorithm, and use it for this GEMM in the rest of this process."""
    calls = prepare(case)
    calls.ours()  # makes the plan to which the functions of `_C` below refer
    problem = _C.gemm_problem()
    _C.gemm_use_guess()
    reference = calls.ours()
    times = _search(calls, time.monotonic() + seconds)
    ranked = sorted(times, key=times.__getitem__)
    correct = (a for a in ranked if _agrees(calls, a, reference))
    medians = _final(calls, list(itertools.islice(correct, FINALISTS)))
    best = min((a for a in medians if isinstance(a, tuple)), key=medians.__getitem__, default=None)
    if best is not None and medians[best] > KEEP * medians["guess"]:
        best = None
    if best is None:
        _C.gemm_use_guess()
    else:
        _C.gemm_use(best)
    us = medians["guess" if best is None else best]
    return Tuned(problem, best, us, medians["guess"], medians.get("torch"), len(times))


def _search(calls: Calls, deadline: float) -> dict[Algorithm, float]:
    """Microseconds of every algorithm that was tried, with warm caches."""
    times: dict[Algorithm, float] = {}

    def try_all(algorithms: list[Algorithm]) -> None:
        for algorithm in algorithms:
            if algorithm not in times and time.monotonic() < deadline and _C.gemm_use(algorithm):
                times[algorithm] = _quick_us(calls.ours)

    try_all([tuple(a) for a in _C.gemm_guesses(GUESSES)])
    best: Algorithm | None = None
    while times and time.monotonic() < deadline:
        leader = min(times, key=times.__getitem__)
        if leader == best:
            break  # no neighbour was faster
        best = leader
        neighbours = [tuple(a) for a in _C.gemm_neighbours(leader)]
        random.shuffle(neighbours)
        try_all(neighbours)
    return times


def _repeated(call: Callable[[], object]) -> Callable[[], None]:
    """The replay of a CUDA graph of several calls."""

    def several() -> None:
        for _ in range(CALLS):
            call()

    return captured(several)


def _quick_us(call: Callable[[], object]) -> float:
    replay = _repeated(call)
    replay()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3 / CALLS


def _agrees(calls: Calls, algorithm: Algorithm, reference: torch.Tensor) -> bool:
    """Whether the result differs from the reference only by rounding."""
    _C.gemm_use(algorithm)
    difference = (calls.ours().float() - reference.float()).abs().max()
    return bool(difference <= 2**-6 * reference.float().abs().max())


def _final(calls: Calls, finalists: list[Algorithm]) -> dict[Algorithm | str, float]:
    """Median microseconds of the finalists, the first guess and torch, timed in turns."""
    contenders: dict[Any, Callable[[], None]] = {}
    if calls.torch is not None:
        contenders["torch"] = _repeated(calls.torch)
    _C.gemm_use_guess()
    contenders["guess"] = _repeated(calls.ours)
    for algorithm in finalists:
        _C.gemm_use(algorithm)
        contenders[algorithm] = _repeated(calls.ours)
    timings = time_gpu_each(contenders, repeats=15, warmup=3, cold=False)
    return {name: timing.median_us / CALLS for name, timing in timings.items()}


def write_table(path: Path, found: list[Tuned]) -> None:
    """Write the rows of the tuned GEMMs; rows of other GEMMs stay."""
    lines = TABLE.read_text().splitlines()
    head = [line for line in lines if line.startswith("//")]
    tuned = tuple(f"{{{t.problem}, " for t in found)
    untouched = [line for line in lines if line.startswith("{") and not line.startswith(tuned)]
    head = [line for line in head if not line.startswith("// Measured on ")]
    head.append(f"// Measured on {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}.")
    rows = sorted(untouched + [t.row for t in found if t.algorithm is not None or t.is_forward])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*head, *rows]) + "\n")
    print(f"wrote {path}: {len(rows)} rows for {len(found)} products", flush=True)


def tune_all(chosen: Sequence[Case], seconds: float, out: Path) -> list[Tuned]:
    """Tune the cases, report each, and write the table."""
    report = Report("gemm_tuning")
    found = []
    for case in chosen:
        tuned = tune(case, seconds)
        found.append(tuned)
        report.row(
            op=case.op,
            case=case.label,
            us=round(tuned.us, 2),
            guess_us=round(tuned.guess_us, 2),
            torch_us=tuned.torch_us,
            ratio=tuned.torch_us and round(tuned.torch_us / tuned.us, 3),
            tried=tuned.tried,
            algorithm=tuned.algorithm,
        )
    report.save()
    write_table(out, found)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=TABLE, help="the table to write")
    parser.add_argument("--precision", action="append", help="which products; default: all")
    parser.add_argument("--layer", action="append", help="of gemm_cases.py; default: all")
    parser.add_argument("--adding", action="store_true", help="only GEMMs that add a residual")
    parser.add_argument("--seconds", type=float, default=2.0, help="search time of one product")
    options = parser.parse_args()
    require_gpu()
    random.seed(0)
    torch.manual_seed(0)
    chosen = [
        case
        for case in cases(options.precision or ("fp8", "fp8 blocks", "bf16"))
        if (options.layer is None or set(case.name.split()) & set(options.layer))
        and (case.adds or not options.adding)
    ]
    tune_all(chosen, options.seconds, options.out)
