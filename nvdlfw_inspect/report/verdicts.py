"""Applies the rules to a run: a verdict for every series, the worst first."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from nvdlfw_inspect.report.records import Key, Run, Series
from nvdlfw_inspect.report.rules import RULES, Finding, Level, Subject, flow_order
from nvdlfw_inspect.report.statistic import Statistic


@dataclass(frozen=True)
class Row:
    """The verdict on one series; of several ranks, the worst one."""

    key: Key
    rank: int  # represents all ranks of its reduction group, see `Run.copies`
    last: float
    extreme: float  # the value of largest magnitude, or the first that is not finite
    step: int  # where the extreme was
    level: Level
    finding: Finding | None
    also: tuple[str, ...] = ()  # other statistics of the tensor that the same rule found

    @property
    def reason(self) -> str:
        """The reason for the level; empty for ok."""
        if not self.finding:
            return ""
        also = f" (also {', '.join(self.also)})" if self.also else ""
        return f"{self.finding.rule.name}: {self.finding.reason}{also}"


@dataclass(frozen=True)
class Verdicts:
    """The verdicts on all series of a run."""

    run: Run
    rows: list[Row]  # the worst first
    findings: list[Finding]  # the worst first; a series may have several

    @property
    def level(self) -> Level:
        """The level of the worst series."""
        return self.rows[0].level

    @cached_property
    def counts(self) -> Counter[Level]:
        """How many series are at each level."""
        return Counter(row.level for row in self.rows)

    @cached_property
    def folded(self) -> list[Row]:
        """The rows, with one row for all statistics of a tensor that the same rule found."""
        groups: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            layer, tensor, statistic = row.key
            why = row.finding.rule.name if row.finding else f"ok {statistic}"
            groups.setdefault((layer, tensor, why), []).append(row)
        return [
            replace(first, also=tuple(row.key.statistic for row in rest))
            for first, *rest in groups.values()
        ]

    @cached_property
    def by_key(self) -> dict[Key, Row]:
        """The rows by key."""
        return {row.key: row for row in self.rows}


def judge(run: Run) -> Verdicts:
    """Applies all rules to all series of a run."""
    order = flow_order(run)
    urgency = {rule.name: i for i, rule in enumerate(RULES)}

    def worst_first(finding: Finding) -> tuple[float | int, ...]:
        return (-finding.level, urgency[finding.rule.name], -finding.severity, *order(finding))

    findings: list[Finding] = []
    rows: list[tuple[tuple[float | int, ...], Row]] = []
    for number, (key, ranks) in enumerate(run.series.items()):
        series_findings = sorted(
            (f for rank, series in ranks.items() for f in _findings(run, key, rank, series)),
            key=worst_first,
        )
        findings += series_findings
        worst = series_findings[0] if series_findings else None
        row = _row(key, ranks, worst)
        rows.append(((*worst_first(worst), number) if worst else (0, number), row))
    rows.sort(key=lambda pair: pair[0])
    return Verdicts(run, [row for _, row in rows], sorted(findings, key=worst_first))


def _findings(run: Run, key: Key, rank: int, series: Series) -> list[Finding]:
    statistic = Statistic.parse(key.statistic)
    subject = Subject(run, key, rank, series, statistic)
    found = (rule.judge(rule, subject) for rule in RULES if rule.applies(statistic))
    return [finding for finding in found if finding]


def _row(key: Key, ranks: dict[int, Series], worst: Finding | None) -> Row:
    statistic = Statistic.parse(key.statistic)
    if worst:
        rank = worst.subject.rank
        series = ranks[rank]
        value, step = worst_value(series, statistic)
    else:
        worst_of = {r: worst_value(s, statistic) for r, s in ranks.items()}
        rank = max(ranks, key=lambda r: _size(worst_of[r][0], statistic))
        series, (value, step) = ranks[rank], worst_of[rank]
    level = worst.level if worst else Level.OK
    return Row(key, rank, series.values[-1], value, step, level, worst)


def worst_value(series: Series, statistic: Statistic) -> tuple[float, int]:
    """Returns the worst value and its step.

    This is the first value that is not finite. If all are finite, it is the value of largest
    magnitude or, for `scale_inv_min`, the smallest one.
    """
    values = series.values
    low, high = min(values), max(values)
    if not math.isfinite(sum(values)):
        for i, v in enumerate(values):
            if not math.isfinite(v):
                return v, series.steps[i]
    value = max(high, low, key=lambda v: _size(v, statistic))
    return value, series.steps[values.index(value)]


def _size(value: float, statistic: Statistic) -> float:
    """How bad a value is: NaN is the worst, then large magnitudes, or a small `scale_inv_min`."""
    if math.isnan(value):
        return math.inf
    return -value if statistic.base == "scale_inv_min" else abs(value)
