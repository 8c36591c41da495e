"""Data for the charts of the page: every series, downsampled to the same columns of steps.

If there are more steps than columns, a column stands for several steps and shows the worst of them,
so that no peak is lost.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import Any

from nvdlfw_inspect.report.records import Key, Run, Series, common_prefix
from nvdlfw_inspect.report.rules import RULES, Level
from nvdlfw_inspect.report.statistic import PERCENT, SIGNED, TENSORS, Statistic
from nvdlfw_inspect.report.verdicts import Verdicts, worst_value

MOST_COLUMNS = 600
FEWEST_COLUMNS = 100
MOST_DIGITS = 9  # significant digits of an fp32 value
MOST_CELLS = 2_000_000  # in all series together; a cell takes about 4 bytes in the page
Cell = float | str | None


@dataclass(frozen=True)
class Columns:
    """The steps of the charts: `of_step` is the column of a step.

    Column i holds the steps `first[i]` to `last[i]`.
    """

    of_step: dict[int, int]
    first: list[int]
    last: list[int]

    @property
    def steps_each(self) -> int:
        """The most recorded steps that a column stands for."""
        return math.ceil(len(self.of_step) / len(self.first))


def columns_for(runs: list[Run]) -> Columns:
    """Divides the steps of one run, or of two that share a chart, into columns."""
    steps = sorted(set().union(*(run.steps for run in runs)))
    series = sum(len(run.series) for run in runs)
    fitting = min(MOST_COLUMNS, max(FEWEST_COLUMNS, MOST_CELLS // series))
    count = min(len(steps), fitting)
    of_step = {step: i * count // len(steps) for i, step in enumerate(steps)}
    first, last = [0] * count, [0] * count
    for step in reversed(steps):
        first[of_step[step]] = step
    for step in steps:
        last[of_step[step]] = step
    return Columns(of_step, first, last)


class Binner:
    """Downsamples series to columns; borders are computed once for series with equal steps."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self._borders: dict[bytes, list[tuple[int, int, int]]] = {}

    def cells(self, key: Key, ranks: dict[int, Series]) -> list[Cell]:
        """Returns the value of each column: the worst of its steps and of all ranks, or None."""
        statistic = Statistic.parse(key.statistic)
        found = [self._row(series, statistic) for series in ranks.values()]
        if len(found) == 1:
            return found[0]
        return [_worst(cells, statistic) for cells in zip(*found, strict=True)]

    def _row(self, series: Series, statistic: Statistic) -> list[Cell]:
        row: list[Cell] = [None] * len(self.columns.first)
        for column, begin, end in self._runs(series.steps):
            if end - begin == 1:
                value = series.values[begin]
            else:
                part = Series(series.steps[begin:end], series.values[begin:end])
                value = worst_value(part, statistic)[0]
            row[column] = value if math.isfinite(value) else str(value)
        digits = _digits([cell for cell in row if isinstance(cell, float)])
        return [float(f"{c:.{digits}g}") if isinstance(c, float) else c for c in row]

    def _runs(self, steps: array[int]) -> list[tuple[int, int, int]]:
        """Returns (column, begin, end) of the records that fall into each column."""
        data = steps.tobytes()
        if data not in self._borders:
            borders: list[tuple[int, int, int]] = []
            for i, step in enumerate(steps):
                column = self.columns.of_step[step]
                begin = borders.pop()[1] if borders and borders[-1][0] == column else i
                borders.append((column, begin, i + 1))
            self._borders[data] = borders
        return self._borders[data]


def _digits(values: list[float]) -> int:
    """Returns how many significant digits a curve needs to look smooth; at least four."""
    span = max(values, default=0.0) - min(values, default=0.0)
    if not span:
        return MOST_DIGITS
    peak = max(map(abs, values))
    return min(MOST_DIGITS, 4 + max(0, math.floor(math.log10(peak / span))))


def _worst(cells: tuple[Cell, ...], statistic: Statistic) -> Cell:
    spelt = [cell for cell in cells if isinstance(cell, str)]
    if spelt:
        return spelt[0]
    numbers = [cell for cell in cells if isinstance(cell, float)]
    if not numbers:
        return None
    return min(numbers) if statistic.base == "scale_inv_min" else max(numbers, key=abs)


def payload(verdicts: list[Verdicts], columns: Columns) -> dict[str, Any]:
    """Returns the data for the page's script: columns, layers, a panel per tensor and statistic.

    A panel has, for each run and layer, a list of values (None where the layer has none) and, for
    the first run, the verdict of each layer, and the layers with a finding, the worst first.
    """
    runs = [v.run for v in verdicts]
    layers = list(dict.fromkeys(layer for run in runs for layer in run.layers))
    prefix = common_prefix(layers)
    binner = Binner(columns)
    kinds = dict.fromkeys((key.tensor, key.statistic) for run in runs for key in run.series)
    number = {layer: i for i, layer in enumerate(layers)}
    worst: dict[tuple[str, str], list[int]] = {}  # in the order of the table
    for row in verdicts[0].rows:
        if row.level:
            worst.setdefault(row.key[1:], []).append(number[row.key.layer])
    panels = []
    for tensor, statistic in sorted(kinds, key=_order):
        keys = [Key(layer, tensor, statistic) for layer in layers]
        rows = [[_cells_of(binner, run, key) for key in keys] for run in runs]
        first = verdicts[0].by_key
        levels = [first[key].level if key in first else Level.OK for key in keys]
        found = {"rows": rows, "levels": levels, "worst": worst.get((tensor, statistic), [])}
        panels.append(_panel(tensor, statistic) | found)
    return {
        "first": columns.first,
        "last": columns.last,
        "layers": layers,
        "short": [layer.removeprefix(prefix) for layer in layers],
        "panels": panels,
        "open": _first_panel(verdicts[0], panels),
        "runs": [str(run.path) for run in runs],
    }


def _cells_of(binner: Binner, run: Run, key: Key) -> list[Cell] | None:
    ranks = run.series.get(key)
    return binner.cells(key, ranks) if ranks else None


def _order(kind: tuple[str, str]) -> tuple[int, str, str]:
    tensor, statistic = kind
    return TENSORS.index(tensor) if tensor in TENSORS else len(TENSORS), tensor, statistic


def _panel(tensor: str, statistic: str) -> dict[str, Any]:
    base = Statistic.parse(statistic).base
    limits = [
        (level.word, getattr(rule, level.word))
        for rule in RULES
        if base in PERCENT and base in rule.statistics
        for level in (Level.WATCH, Level.BAD)
    ]
    return {
        "tensor": tensor,
        "statistic": statistic,
        "limits": limits,
        "signed": base in SIGNED,
        "percent": base in PERCENT,
    }


def _first_panel(verdicts: Verdicts, panels: list[dict[str, Any]]) -> int:
    """Returns the index of the panel that the page shows first: that of the worst series."""
    kind = verdicts.rows[0].key[1:]
    return next(i for i, p in enumerate(panels) if (p["tensor"], p["statistic"]) == kind)
