"""The table of the worst series, in the form that terminals, notebooks and pages share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nvdlfw_inspect.report.records import Run, spans
from nvdlfw_inspect.report.rules import Level
from nvdlfw_inspect.report.statistic import PERCENT, Statistic
from nvdlfw_inspect.report.verdicts import Row, Verdicts


@dataclass(frozen=True)
class Column:
    """A column's title, and whether it holds numbers."""

    title: str
    numeric: bool = False


@dataclass(frozen=True)
class Table:
    """Cells as text, with the level of each row."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    levels: Sequence[Level]
    left_out: int  # rows beyond the limit


def table_of(verdicts: Verdicts, limit: int | None = None) -> Table:
    """Makes the table of a run, the worst series first; `limit` None shows all."""
    several = len(verdicts.run.ranks) > 1
    shown = verdicts.folded[:limit]
    columns = [
        Column("verdict"),
        Column("layer"),
        Column("tensor"),
        Column("statistic"),
        *([Column("rank", numeric=True)] if several else []),
        Column("last", numeric=True),
        Column("extreme", numeric=True),
        Column("step", numeric=True),
        Column("why"),
    ]
    rows = [_cells(row, verdicts.run if several else None) for row in shown]
    return Table(columns, rows, [r.level for r in shown], len(verdicts.folded) - len(shown))


def _cells(row: Row, of_ranks: Run | None) -> list[str]:
    """The cells of a row; with a cell for the ranks, if `of_ranks` is a run with several."""
    ranks = [] if of_ranks is None else of_ranks.copies[row.key.layer, row.key.tensor][row.rank]
    return [
        row.level.word,
        *row.key,
        *([spans(ranks)] if ranks else []),
        number(row.last, row.key.statistic),
        number(row.extreme, row.key.statistic),
        f"{row.step:,}",
        row.reason,
    ]


def number(value: float, statistic: str = "") -> str:
    """Formats a value with four significant digits, a share with two decimals.

    >>> number(0.012346), number(123456.0), number(0.00001234), number(7.0, "underflows%")
    ('0.01235', '1.235e+05', '1.234e-05', '7.00')
    """
    if not math.isfinite(value):
        return str(value)
    if Statistic.parse(statistic).base in PERCENT:
        return f"{value:.2f}"
    return f"{value:.4g}"


def count_of(number: int, noun: str) -> str:
    """Formats a count with its noun.

    >>> count_of(1, "step"), count_of(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def tally(verdicts: Verdicts) -> str:
    """Returns a line with the number of series at each level."""
    run, counts = verdicts.run, verdicts.counts
    found = ", ".join(f"{counts[level]:,} {level.word}" for level in sorted(Level, reverse=True))
    return f"{found}: {len(verdicts.rows):,} series of {count_of(run.layer_count, 'layer')}"


def extent(verdicts: Verdicts) -> str:
    """Returns a line about the steps and ranks that were read, and about skipped records."""
    run = verdicts.run
    steps = run.steps
    text = f"{count_of(run.records, 'record')} of {count_of(len(steps), 'step')}, "
    text += f"{steps[0]:,} to {steps[-1]:,}, " if len(steps) > 1 else f"number {steps[0]:,}, "
    text += count_of(len(run.ranks), "rank")
    if run.empty:
        text += f"; {run.empty:,} of empty tensors"
    if run.skipped:
        text += f"; {count_of(run.skipped, 'damaged line')} skipped"
    return text
