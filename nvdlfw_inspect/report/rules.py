"""Rules that judge a series: thresholds are data, and each kind of rule has a function.

A rule takes one series and returns a `Finding` or None. advice.py says what to do about a finding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from nvdlfw_inspect.report.records import HIGH_PRECISION, Key, Run, Series
from nvdlfw_inspect.report.statistic import (
    BACKWARD,
    BLOCKWISE,
    GEMMS_OF_OPERAND,
    TENSORS,
    Statistic,
)


class Level(IntEnum):
    """The verdict on a series."""

    OK = 0
    WATCH = 1
    BAD = 2

    @property
    def word(self) -> str:
        """The name of the level: ok, watch or bad."""
        return self.name.lower()


@dataclass(frozen=True)
class Subject:
    """One series of one rank, and its run."""

    run: Run
    key: Key
    rank: int
    series: Series
    statistic: Statistic

    def beside(self, base: str, recipe: str = "", columnwise: bool | None = None) -> Series | None:
        """Returns another statistic of the same tensor and rank, or None if it was not logged.

        By default it is of the same direction (row-wise or column-wise) as this statistic.
        """
        of_tensor = self.run.siblings[self.key.layer, self.key.tensor]
        if columnwise is None:
            columnwise = self.statistic.columnwise
        key = of_tensor.get(Statistic(base, recipe, columnwise))
        return self.run.series[key].get(self.rank) if key else None

    @property
    def is_what_if(self) -> bool:
        """Whether its recipe was not in use: the statistic of the recipe in use was logged, too."""
        return bool(self.statistic.recipe and self.beside(self.statistic.base))

    @property
    def fp8_gemms(self) -> tuple[str, ...]:
        """The GEMMs that take the tensor, without those that ran in high precision."""
        layer, tensor = self.key.layer, self.key.tensor
        gemms = GEMMS_OF_OPERAND.get(tensor, ())
        return tuple(g for g in gemms if self.run.plan.get((layer, tensor, g)) != HIGH_PRECISION)


@dataclass(frozen=True)
class Finding:
    """The finding of a rule about a series."""

    rule: Rule
    subject: Subject
    level: Level
    step: int  # where it is at its worst, or where it began
    value: float  # the value at that step
    severity: float  # 1 at the threshold of `watch`; orders findings of one level
    reason: str


Judge = Callable[["Rule", Subject], Finding | None]


@dataclass(frozen=True)
class Rule:
    """When a statistic is worth watching, and when it is bad."""

    name: str
    statistics: frozenset[str]  # base names; empty: all
    judge: Judge = field(repr=False)
    watch: float = math.nan
    bad: float = math.nan
    unit: str = ""

    def applies(self, statistic: Statistic) -> bool:
        """Returns whether the rule applies to a statistic."""
        return not self.statistics or statistic.base in self.statistics


PERSISTENT = 0.05  # share of steps; a rarer finding that is not at the last step has passed
GROWTH_STEPS = 10  # a jump happens within so many steps; amax histories often have 16 entries
ZERO_RECORDS = 3  # a tensor is dead if so many records in a row at the end are zero
# The dynamic range of a format in bits: log2(largest value / smallest subnormal value).
E4M3_BITS = math.log2(448 / 2**-9)  # 17.8
E5M2_BITS = math.log2(57344 / 2**-16)  # 31.8


def largest(values: Iterable[float]) -> float:
    """Returns the largest finite value, NaN if there is none; `max` alone may return NaN."""
    return max(filter(math.isfinite, values), default=math.nan)


def over_threshold(rule: Rule, subject: Subject) -> Finding | None:
    """Finds shares above a threshold; the level is one lower if they were rare and have passed."""
    values = subject.series.values
    worst = largest(values)
    if not worst > rule.watch:
        return None
    level, limit = Level.OK, rule.watch
    for reached, threshold in ((Level.WATCH, rule.watch), (Level.BAD, rule.bad)):
        count = sum(v > threshold for v in values)
        lasting = values[-1] > threshold or count > max(1, PERSISTENT * len(values))
        if count and (found := reached if lasting else Level(reached - 1)) >= level:
            level, limit = found, threshold
    if level is Level.OK or subject.is_what_if or not subject.fp8_gemms:
        return None
    count = sum(v > limit for v in values)
    reason = f"over {limit:g}{rule.unit} at {count} of {len(values)} steps"
    if values[-1] <= limit:
        reason += ", not at the last"
    return _at(rule, subject, level, values.index(worst), worst / rule.watch, reason)


def not_finite(rule: Rule, subject: Subject) -> Finding | None:
    """Finds NaN and Inf, but not a dynamic range of NaN, which a tensor of zeros has."""
    series = subject.series
    if math.isfinite(sum(series.values)):
        return None
    zero_is_nan = subject.statistic.base in {"dynamic_range", BLOCKWISE}
    bad = [
        i
        for i, v in enumerate(series.values)
        if not math.isfinite(v) and not (zero_is_nan and math.isnan(v))
    ]
    if not bad:
        return None
    now = "and still at the last" if bad[-1] == len(series.values) - 1 else "gone at the last"
    reason = f"at {len(bad)} of {len(series.values)} steps, {now}"
    return _at(rule, subject, Level.BAD, bad[0], math.inf, reason)


def grows(rule: Rule, subject: Subject) -> Finding | None:
    """Finds a jump to a multiple of the value of a few steps before."""
    positive = [
        (s, v)
        for s, v in zip(subject.series.steps, subject.series.values, strict=True)
        if 0 < v < math.inf
    ]
    if len(positive) < 2:
        return None
    largest = max(v for _, v in positive)
    if largest < rule.watch * min(v for _, v in positive):
        return None
    growth, at, value, steps = max(_growths(positive))
    level = Level.BAD if growth >= rule.bad else Level.WATCH
    if growth < rule.watch:
        return None
    took = f"{steps} step{'s' if steps > 1 else ''}"
    reason = f"x {growth:.3g} within {took}, to {value:.3g}"
    return Finding(rule, subject, level, at, value, growth / rule.watch, reason)


def _growths(values: list[tuple[int, float]]) -> Iterator[tuple[float, int, float, int]]:
    """Yields (growth, step, value, steps that the growth took) for every record but the first.

    The growth is the ratio to the smallest value of the `GROWTH_STEPS` steps before. The previous
    record always counts, so that a run that is recorded every hundredth step is judged, too.
    """
    begin = 0
    for i in range(1, len(values)):
        step, value = values[i]
        while begin < i - 1 and values[begin][0] < step - GROWTH_STEPS:
            begin += 1
        since, least = min(values[begin:i], key=lambda pair: pair[1])
        yield value / least, step, value, step - since


def too_wide(rule: Rule, subject: Subject) -> Finding | None:
    """Finds tensors whose values span more bits than the FP8 format of the tensor holds.

    The level is never `bad`, because what counts is how many values are lost. `underflows%` says
    that: if it was logged, this rule finds nothing.
    """
    if not subject.fp8_gemms or subject.beside("underflows%"):
        return None
    name, bits = ("E5M2", E5M2_BITS) if subject.key.tensor in BACKWARD else ("E4M3", E4M3_BITS)
    values = subject.series.values
    finite = [v if math.isfinite(v) else 0.0 for v in values]
    worst = max(finite, default=0.0)
    count = sum(v > bits for v in finite)
    if count <= PERSISTENT * len(values):
        return None
    reason = f"{worst:.1f} bits, {name} holds {bits:.1f}; over at {count} of {len(values)} steps"
    return _at(rule, subject, Level.WATCH, finite.index(worst), worst / bits, reason)


def all_zero(rule: Rule, subject: Subject) -> Finding | None:
    """Finds tensors of zeros: bad if they are zero to the end, to be watched if only at times.

    Zeros only at the beginning are no finding: some weights are initialised to zero.
    """
    values = subject.series.values
    as_nan = subject.statistic.base == "dynamic_range"
    if as_nan and any(map(subject.beside, ("cur_amax", "l1_norm", "l2_norm", "std"))):
        return None  # these statistics can tell zeros from NaN
    zero = [math.isnan(v) if as_nan else v == 0 for v in values]
    if not any(zero):
        return None
    alive = next((i for i, z in enumerate(zero) if not z), len(zero))  # the first record that lives
    at_end = next((i for i, z in enumerate(reversed(zero)) if not z), len(zero))
    if at_end >= min(ZERO_RECORDS, len(zero)):
        level, first = Level.BAD, len(zero) - at_end
        reason = "from the first step on" if first == 0 else "to the last step"
    elif any(zero[alive:]):
        level, first = Level.WATCH, zero.index(True, alive)
        reason = f"at {sum(zero)} of {len(zero)} steps"
    else:
        return None
    return _at(rule, subject, level, first, 1.0 + at_end / len(zero), f"all zero {reason}")


def noisy(rule: Rule, subject: Subject) -> Finding | None:
    """Finds too little signal above rounding errors: 10 log10((std^2 + mean^2) / mse), in dB."""
    std, mean = (subject.beside(name, columnwise=False) for name in ("std", "mean"))
    if std is None or subject.is_what_if or not subject.fp8_gemms:
        return None
    spread = dict(zip(std.steps, std.values, strict=True))
    centre = dict(zip(mean.steps, mean.values, strict=True)) if mean else {}
    found = []
    for i, (step, mse) in enumerate(zip(subject.series.steps, subject.series.values, strict=True)):
        # A float overflows to infinity when multiplied, and raises when squared by `**`.
        power = sum(v * v for v in (spread.get(step, math.nan), centre.get(step, 0.0)))
        if 0 < mse < math.inf and 0 < power < math.inf:
            found.append((10 * math.log10(power / mse), i))
    if not found or (worst := min(found))[0] >= rule.watch:
        return None
    decibel, at = worst
    below = sum(d < rule.watch for d, _ in found)
    lasting = found[-1][0] < rule.bad or sum(d < rule.bad for d, _ in found) > max(
        1, PERSISTENT * len(found)
    )
    level = Level.BAD if lasting else Level.WATCH
    reason = f"signal {decibel:.1f} dB above rounding; under {rule.watch:g} dB"
    reason += f" at {below} of {len(found)} steps"
    return _at(rule, subject, level, at, 2 ** ((rule.watch - decibel) / 10), reason)


def _at(
    rule: Rule, subject: Subject, level: Level, index: int, severity: float, reason: str
) -> Finding:
    series = subject.series
    step, value = series.steps[index], series.values[index]
    return Finding(rule, subject, level, step, value, severity, reason)


# In the order of urgency: of two findings of one level, the earlier rule's comes first.
RULES = (
    Rule("non-finite", frozenset(), not_finite),
    Rule("overflow", frozenset({"overflows%"}), over_threshold, watch=1, bad=5, unit=" %"),
    Rule("underflow", frozenset({"underflows%"}), over_threshold, watch=2, bad=10, unit=" %"),
    Rule("dead", frozenset({"cur_amax", "l1_norm", "l2_norm", "dynamic_range"}), all_zero),
    Rule("noise", frozenset({"mse"}), noisy, watch=20, bad=10, unit=" dB"),
    Rule("growth", frozenset({"cur_amax", "scale_inv_max"}), grows, watch=2**4, bad=2**7),
    Rule("range", frozenset({"dynamic_range", BLOCKWISE}), too_wide, unit=" bits"),
)


def flow_order(run: Run) -> Callable[[Finding], tuple[int, int, int, int]]:
    """Returns a sort key: by step, and within a step in the order in which tensors are produced."""
    index = {layer: i for i, layer in enumerate(run.layers)}

    def position(finding: Finding) -> tuple[int, int, int, int]:
        layer, tensor, _ = finding.subject.key
        back = tensor in BACKWARD
        kind = TENSORS.index(tensor) if tensor in TENSORS else len(TENSORS)
        return finding.step, int(back), -index[layer] if back else index[layer], kind

    return position
