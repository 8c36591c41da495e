"""Reads the logs of a run.

`LOGDIR/statistics_rank-R.jsonl` has one record per line; the debug logs say in which precision the
GEMMs ran. Files are read as streams: a record takes a few microseconds, and 16 bytes of memory.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from nvdlfw_inspect.report.statistic import Statistic

FILE_NAME = "statistics_rank-R.jsonl"
FILE = re.compile(r"statistics_rank-(\d+)\.jsonl")
PLAN_FILES = "nvdlfw_inspect_logs/nvdlfw_inspect_*globalrank-{rank}.log"  # * is a stamp or empty
PLAN_LINE = re.compile(
    r"(?:^|- )INFO - (?P<layer>\S.*): Tensor: (?P<tensor>\w+), gemm (?P<gemm>\w+) - (?P<plan>.+)$"
)
HIGH_PRECISION = "High precision"
LINES_AT_ONCE = 4096  # one call of json for several lines takes half the time
NO_TENSOR = ("", "", "")  # layer, tensor and statistic of a scalar that the program logs itself
SPELT_OUT = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


class LogError(ValueError):
    """A log directory has no usable logs."""


class Key(NamedTuple):
    """Names a statistic of a tensor of a layer.

    For a scalar that the program logs itself, `layer` is the name of the scalar, `tensor` is empty.
    """

    layer: str
    tensor: str
    statistic: str


@dataclass(slots=True)
class Series:
    """The values of one statistic on one rank, sorted by step."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def cut(self, length: int) -> None:
        """Keeps the first `length` records and drops the others."""
        del self.steps[length:], self.values[length:]


@dataclass
class Run:
    """All records of a run: for every key, a series per rank.

    Ranks that have logged the same about a tensor, such as those of a reduction group, are
    represented by the first of them.
    """

    path: Path
    series: dict[Key, dict[int, Series]] = field(default_factory=dict)
    plan: dict[tuple[str, str, str], str] = field(default_factory=dict)  # (layer, tensor, gemm)
    ranks: list[int] = field(default_factory=list)
    # (layer, tensor) -> rank in `series` -> ranks that have logged the same: a reduction group
    copies: dict[tuple[str, str], dict[int, list[int]]] = field(default_factory=dict)
    records: int = 0
    empty: int = 0  # records of tensors without elements, which have no value
    skipped: int = 0  # damaged lines: kill -9 may cut the last one

    @cached_property
    def layers(self) -> list[str]:
        """The layers in the order of the forward pass, as far as it is known from the logs."""
        planned = dict.fromkeys(layer for layer, _, _ in self.plan)
        logged = dict.fromkeys(key.layer for key in self.series)
        return [n for n in planned if n in logged] + [n for n in logged if n not in planned]

    @cached_property
    def layer_count(self) -> int:
        """How many layers have statistics of tensors."""
        return len({key.layer for key in self.series if key.tensor})

    @cached_property
    def siblings(self) -> dict[tuple[str, str], dict[Statistic, Key]]:
        """The logged statistics of each tensor: (layer, tensor) -> statistic -> key."""
        found: dict[tuple[str, str], dict[Statistic, Key]] = {}
        for key in self.series:
            of_tensor = found.setdefault((key.layer, key.tensor), {})
            of_tensor[Statistic.parse(key.statistic)] = key
        return found

    @cached_property
    def steps(self) -> list[int]:
        """All steps with records, sorted."""
        distinct = {s.steps.tobytes() for ranks in self.series.values() for s in ranks.values()}
        union: set[int] = set()
        for data in distinct:
            union.update(array("q", data))
        return sorted(union)


def read_run(logdir: str | Path, rank: int | None = None) -> Run:
    """Reads the records of all ranks from a directory of logs, or those of one rank.

    Raises:
        LogError: the directory does not exist, or has no statistics (of that rank).
    """
    path = Path(logdir)
    files = _files(path)
    if rank is not None:
        if rank not in files:
            raise LogError(
                f"[report] expected statistics_rank-{rank}.jsonl in {path}, got ranks {list(files)}"
            )
        files = {rank: files[rank]}
    run = Run(path, ranks=list(files))
    for number, file in files.items():
        _read_rank(run, number, file)
        for log in path.glob(PLAN_FILES.format(rank=number)):
            _read_plan(run, log)
    if not run.records and not run.skipped:
        raise LogError(
            f"[report] expected statistics in {path / FILE_NAME}, got empty files: nothing was "
            f"logged; warnings of the run say why, and the log in {path / 'nvdlfw_inspect_logs'} "
            "names what was skipped"
        )
    if not run.records:
        example = '{"iteration": 1, "layer": ..., "tensor": ..., "statistic": ..., "value": ...}'
        raise LogError(
            f"[report] expected lines like {example} in {path / FILE_NAME}, "
            f"got none ({run.skipped} damaged)"
        )
    if not run.series:
        raise LogError(
            f"[report] expected values in {path / FILE_NAME}, got {run.empty} records of tensors"
            " without elements"
        )
    if len(files) > 1:
        _fold_copies(run)
    return run


def _fold_copies(run: Run) -> None:
    """Keeps one of the ranks that have logged the same about a tensor."""
    of_tensor: dict[tuple[str, str], list[Key]] = {}
    for key in run.series:
        of_tensor.setdefault((key.layer, key.tensor), []).append(key)
    for tensor, keys in of_tensor.items():
        by_content: dict[tuple[object, ...], list[int]] = {}
        for rank in run.ranks:
            series = {key: run.series[key][rank] for key in keys if rank in run.series[key]}
            if series:
                content = ((k, s.steps.tobytes(), s.values.tobytes()) for k, s in series.items())
                by_content.setdefault(tuple(content), []).append(rank)
        run.copies[tensor] = {ranks[0]: ranks for ranks in by_content.values()}
        first = run.copies[tensor]
        for key in keys:
            run.series[key] = {r: s for r, s in run.series[key].items() if r in first}


def _files(path: Path) -> dict[int, Path]:
    expected = f"[report] expected a log directory that holds {FILE_NAME}, got {path}"
    if not path.is_dir():
        raise LogError(f"{expected}, which is {'a file' if path.exists() else 'not there'}")
    found = {int(m[1]): file for file in path.iterdir() if (m := FILE.fullmatch(file.name))}
    if not found:
        beside = [d for d in (path.parent, *path.iterdir()) if d.is_dir() and _has_statistics(d)]
        hint = f"; {beside[0]} has it" if beside else ""
        raise LogError(f"{expected}, which has no such file{hint}")
    return dict(sorted(found.items()))


def _has_statistics(path: Path) -> bool:
    try:
        return any(FILE.fullmatch(file.name) for file in path.iterdir())
    except OSError:  # not readable
        return False


def _read_rank(run: Run, rank: int, file: Path) -> None:
    found: dict[tuple[str, str, str], Series] = {}
    for record in _objects(file):
        try:
            key = record["layer"], record["tensor"], record["statistic"]
            series = found.get(key)
            if key == NO_TENSOR:
                key = record["name"], "", "value"
                series = found.get(key)
            if series is None:
                series = found[_checked(key)] = Series()
            value = record["value"]
            if value is None:
                run.empty += 1
            else:
                number = SPELT_OUT[value] if isinstance(value, str) else float(value)
                steps = series.steps
                steps.append(record["iteration"])
                series.values.append(number)
                if len(steps) > 1 and steps[-2] >= steps[-1]:
                    of_tensors = (one for (_, tensor, _), one in found.items() if tensor)
                    _go_back(series, of_tensors if key[1] else ())
            run.records += 1
        except (KeyError, TypeError, ValueError, OverflowError):
            run.skipped += 1
    for key, series in found.items():
        if series.steps:
            run.series.setdefault(Key(*key), {})[rank] = series


def _go_back(series: Series, all_series: Iterable[Series]) -> None:
    """Removes the records that the last one replaces, whose step is not larger than the one before.

    If the step is smaller than the one before, a run was resumed from a checkpoint. Then all
    records of later steps belong to the abandoned run. They are removed from all series of tensors
    at once (`all_series`), because a series that is rarely logged may have no record at these steps
    again. If the step is equal, the new record replaces only the earlier one of that step. For a
    scalar, `all_series` is empty: programs choose the steps of scalars, so these say nothing about
    the run.
    """
    step, value = series.steps.pop(), series.values.pop()
    if step < series.steps[-1]:
        for each in all_series:
            each.cut(bisect_right(each.steps, step))
    series.cut(bisect_left(series.steps, step))
    series.steps.append(step)
    series.values.append(value)


def _checked(key: tuple[str, str, str]) -> tuple[str, str, str]:
    if not all(isinstance(part, str) for part in key):
        raise TypeError
    return key


def _objects(file: Path) -> Iterator[Any]:
    """Yields the parsed lines, None for a line that is not JSON."""
    with file.open("rb") as lines:
        while chunk := list(islice(lines, LINES_AT_ONCE)):
            try:
                parsed = json.loads(b"[" + b",".join(chunk) + b"]")
            except (ValueError, RecursionError):
                parsed = [_object(line) for line in chunk if line.strip()]
            yield from parsed


def _object(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _read_plan(run: Run, file: Path) -> None:
    """Reads in which precision GEMMs ran: in high precision if all lines about a GEMM say so."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if ": Tensor: " in line and (match := PLAN_LINE.search(line)):
                gemm, plan = (match["layer"], match["tensor"], match["gemm"]), match["plan"].strip()
                if plan != HIGH_PRECISION or gemm not in run.plan:
                    run.plan[gemm] = plan


def spans(numbers: Sequence[int]) -> str:
    """Formats sorted numbers, with ranges for consecutive ones.

    >>> spans([3]), spans([0, 1, 2, 3, 6, 7])
    ('3', '0-3, 6-7')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def common_prefix(layers: Sequence[str]) -> str:
    """Returns the longest dotted prefix of all layers, including the dot.

    >>> common_prefix(["model.layers.0.fc1", "model.layers.1.fc1"])
    'model.layers.'
    """
    parts = [layer.split(".")[:-1] for layer in layers]
    shared: list[str] = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return "".join(f"{part}." for part in shared)
