"""Advice about findings: one piece for each rule, tensor and level, with its YAML.

Every piece of YAML is a whole section of a config file, can be used alone, and names its layers.
For a bad finding it changes the precision or scaling; for one to watch it only logs statistics.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from nvdlfw_inspect.report.combine import Features, combine
from nvdlfw_inspect.report.rules import RULES, Finding, Level, largest
from nvdlfw_inspect.report.table import count_of
from nvdlfw_inspect.report.verdicts import Verdicts

LOOK_BACK = 10  # steps before a NaN that are worth seeing
Config = dict[str, Any]


@dataclass(frozen=True)
class Advice:
    """Findings of one rule and level about one kind of tensor, and what to do about them."""

    level: Level
    title: str  # the problem, in one line
    text: str  # its cause and its remedy
    findings: list[Finding]  # the worst first
    features: Features  # features that act on the problem, or log it
    act_on: list[str]  # the layers that the YAML names

    @property
    def yaml(self) -> str:
        """A section of a config file; empty if there is nothing to act on."""
        if not self.act_on:
            return ""
        subject = self.findings[0].subject
        level = "watch" if self.level is Level.WATCH else ""
        parts = (level, self.findings[0].rule.name, subject.statistic.recipe, subject.key.tensor)
        name = re.sub(r"\W", "_", "_".join(filter(None, parts)))
        return to_yaml({name: _section(self.act_on, self.features)})

    @property
    def layers(self) -> list[str]:
        """The layers concerned, the worst first."""
        return list(dict.fromkeys(f.subject.key.layer for f in self.findings))


class Told(NamedTuple):
    """The advice of one rule, and the features that act on a bad finding."""

    title: str
    cause: str
    remedy: str
    features: Features
    harmless: bool = False  # the remedy says that nothing needs to change
    layers: list[str] | None = None  # for the YAML, if not all layers with findings


Group = tuple[str, str, str]  # rule, tensor and recipe


def advise(verdicts: Verdicts) -> list[Advice]:
    """Groups the findings of a run into pieces of advice, the most urgent first."""
    groups: dict[tuple[Group, Level], list[Finding]] = {}
    told: dict[tuple[Group, str], Level] = {}  # sorted: a layer's first level is its worst
    for finding in verdicts.findings:
        group = _group(finding)
        level = told.setdefault((group, finding.subject.key.layer), finding.level)
        if finding.level is level:
            groups.setdefault((group, level), []).append(finding)
    advice = [_advice(findings) for findings in groups.values()]
    urgency = [rule.name for rule in RULES]
    return sorted(
        advice, key=lambda a: (-a.level, urgency.index(a.findings[0].rule.name), -len(a.layers))
    )


def _group(finding: Finding) -> Group:
    layer, tensor, _ = finding.subject.key
    if finding.rule.name == "non-finite":
        tensor = "" if tensor else layer  # one piece for all tensors, and one for each scalar
    return finding.rule.name, tensor, finding.subject.statistic.recipe


def headline(verdicts: Verdicts, advice: list[Advice]) -> str:
    """Returns one sentence about the most urgent problem of a run."""
    if advice:
        return advice[0].title
    run = verdicts.run
    return f"Nothing stands out in {count_of(run.layer_count, 'layer')}"


def combined_yaml(advice: list[Advice]) -> str:
    """Returns one config for all advice, in which every layer belongs to one section."""
    sections = combine((piece.act_on, piece.features) for piece in advice)
    return to_yaml(
        {
            f"advice_{i}": _section(layers, features)
            for i, (layers, features) in enumerate(sections, 1)
        }
    )


def _advice(findings: list[Finding]) -> Advice:
    worst = findings[0]
    told = TELL[worst.rule.name](findings)
    layers = told.layers
    if layers is None:
        layers = list(dict.fromkeys(f.subject.key.layer for f in findings))
    bad = worst.level is Level.BAD
    text = f"{told.cause} {told.remedy if bad or told.harmless else WATCH_IT}"
    wanted = told.features if bad else _logging(findings)
    features = {feature: {"enabled": True, **keys} for feature, keys in wanted.items()}
    return Advice(worst.level, told.title, text, findings, features, layers)


def _logging(findings: list[Finding]) -> Features:
    """Returns features that log the statistics of a finding every few steps."""
    key = findings[0].subject.key
    return {
        name: {"stats": stats or [key.statistic], "tensors": [key.tensor], "freq": WATCH_FREQ}
        for name, stats in LOGGED[findings[0].rule.name].items()
    }


def _section(layers: list[str], features: Features) -> Config:
    selector = {"exact_layer_names": layers}
    return {"enabled": True, "layers": selector, "transformer_engine": features}


def _where(findings: list[Finding]) -> str:
    layers = {f.subject.key.layer for f in findings}
    return count_of(len(layers), "layer") if len(layers) > 1 else layers.pop()


def _gemms(findings: list[Finding]) -> list[str]:
    used = {gemm for f in findings for gemm in f.subject.fp8_gemms}
    return [gemm for gemm in ("fprop", "dgrad", "wgrad") if gemm in used]


def _tell_not_finite(findings: list[Finding]) -> Told:
    first = findings[0]
    layer, tensor, statistic = first.subject.key
    what = "NaN" if first.value != first.value else "Infinity"
    title = f"{what} in {layer} since step {first.step:,}"
    if not tensor:
        cause = "The program logs this value itself."
        return Told(title, cause, "Look for the first layer that shows one.", {}, layers=[])
    cause = (
        f"First seen in {statistic} of {tensor}, in the order in which a step computes, and in"
        f" {_where(findings)} altogether."
    )
    if tensor in {"activation", "gradient"}:
        neighbour = "before" if tensor == "activation" else "after"
        cause += f" The layer is given this tensor: look at what comes {neighbour} it, too."
    remedy = (
        "Run the layer in high precision to see whether FP8 is the cause, and look at the steps"
        " that led there."
    )
    watch = {
        "stats": ["min", "max", "cur_amax", "l2_norm"],
        "tensors": ["activation", "weight", "gradient"],
        "start_step": max(0, first.step - LOOK_BACK),
        "end_step": first.step,
    }
    features = {"DisableFP8Layer": {}, "LogTensorStats": watch}
    return Told(title, cause, remedy, features, layers=[layer])


def _tell_share(verb: str, cause: str) -> Callable[[list[Finding]], Told]:
    def tell(findings: list[Finding]) -> Told:
        worst = findings[0]
        tensor, recipe = worst.subject.key.tensor, worst.subject.statistic.recipe
        share = max(f.value for f in findings)
        title = f"Up to {share:.3g} % of the {tensor} {verb} in {_where(findings)}"
        title += f" with {recipe}" if recipe else ""
        gemms = _gemms(findings)
        if all(map(_at_the_start_alone, findings)):
            remedy = (
                "Only the first step shows it, when delayed scaling has no history yet: it is"
                " harmless unless it comes back."
            )
            title += f", at step {worst.step:,} alone"
            return Told(title, cause, remedy, {}, harmless=True)
        helped = _current_scaling(findings)
        if helped is not None:
            remedy = f"With current scaling it would be {helped:.3g} % at the most."
            scaling = {"gemms": gemms, "tensors": [tensor]}
            return Told(title, cause, remedy, {"PerTensorScaling": scaling})
        remedy = "Run the GEMMs that read this tensor in high precision."
        return Told(title, cause, remedy, {"DisableFP8GEMM": {"gemms": gemms}})

    return tell


def _at_the_start_alone(finding: Finding) -> bool:
    first, *later = finding.subject.series.values
    return finding.step == 0 and bool(later) and first > finding.rule.watch >= largest(later)


def _current_scaling(findings: list[Finding]) -> float | None:
    """Returns the worst value under current scaling, if it was logged and is good enough."""
    rule, base = findings[0].rule, findings[0].subject.statistic.base
    what_if = [f.subject.beside(base, "fp8_current_scaling") for f in findings]
    if findings[0].subject.statistic.recipe or None in what_if:
        return None
    worst = largest(value for s in what_if if s for value in s.values)
    return worst if worst <= rule.watch else None


def _tell_dead(findings: list[Finding]) -> Told:
    tensor = findings[0].subject.key.tensor
    cause = (
        "Nothing flows here: a layer that is not used, a mask or activation that closes, or"
        " values that underflow before they arrive."
    )
    watch = {"stats": ["cur_amax", "l2_norm"], "tensors": ["activation", "weight", "gradient"]}
    title = f"The {tensor} is all zero in {_where(findings)}"
    return Told(title, cause, "See where the zeros begin.", {"LogTensorStats": watch})


def _tell_noise(findings: list[Finding]) -> Told:
    tensor = findings[0].subject.key.tensor
    cause = (
        "Rounding to FP8 leaves little of the signal, mostly because a few large values set the"
        " scale for all."
    )
    remedy = "Run the GEMMs that read this tensor in high precision."
    title = f"The {tensor} drowns in rounding noise in {_where(findings)}"
    return Told(title, cause, remedy, {"DisableFP8GEMM": {"gemms": _gemms(findings)}})


def _tell_growth(findings: list[Finding]) -> Told:
    worst = findings[0]
    tensor = worst.subject.key.tensor
    growth = worst.severity * worst.rule.watch
    cause = "Delayed scaling takes its scale from the steps before: a jump saturates."
    remedy = "Scale by the tensor in hand instead, or clip what makes it jump."
    title = f"The {tensor} jumps by a factor of {growth:,.3g} in {_where(findings)}"
    gemms = _gemms(findings)
    scaling = {"PerTensorScaling": {"gemms": gemms, "tensors": [tensor]}}
    # A tensor that no FP8 GEMM reads, such as the result of a GEMM, has no scale to change: log it.
    return Told(title, cause, remedy, scaling if gemms else _logging(findings))


def _tell_range(findings: list[Finding]) -> Told:
    tensor = findings[0].subject.key.tensor
    cause = "The smallest values round to zero whatever the scale."
    remedy = "That is harmless where they are few: log how many there are."
    title = f"The {tensor} spans more bits than its FP8 format holds in {_where(findings)}"
    return Told(title, cause, remedy, {}, harmless=True)


TELL: dict[str, Callable[[list[Finding]], Told]] = {
    "non-finite": _tell_not_finite,
    "overflow": _tell_share("saturates", "The scale is too small for the largest values."),
    "underflow": _tell_share("becomes zero", "The smallest values lie below what FP8 can hold."),
    "dead": _tell_dead,
    "noise": _tell_noise,
    "growth": _tell_growth,
    "range": _tell_range,
}
# Features and statistics that log a finding from now on; []: the statistic of the finding.
LOGGED: dict[str, dict[str, list[str]]] = {
    "overflow": {"LogFp8TensorStats": []},
    "underflow": {"LogFp8TensorStats": []},
    "dead": {"LogTensorStats": ["cur_amax", "l2_norm"]},
    "noise": {"LogFp8TensorStats": ["mse"], "LogTensorStats": ["std", "mean"]},
    "growth": {"LogTensorStats": ["cur_amax"]},
    "range": {"LogFp8TensorStats": ["underflows%"]},
}
WATCH_FREQ = 10  # steps
WATCH_IT = "It is not bad, and nothing needs to change: log it."
PLAIN = re.compile(r"[A-Za-z_][\w.%/-]*")
WIDTH = 56  # longest line that the page shows without cutting it off
RESERVED = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


def to_yaml(config: Config) -> str:
    """Formats a config (mappings, lists of scalars and scalars) as YAML.

    >>> print(to_yaml({"a": {"enabled": True, "gemms": ["fprop", "wgrad"]}}), end="")
    a:
      enabled: True
      gemms: [fprop, wgrad]
    """
    return "".join(f"{line}\n" for line in _lines(config, ""))


def _lines(config: Config, indent: str) -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield f"{indent}{_scalar(key)}:"
            yield from _lines(value, indent + "  ")
            continue
        line = f"{indent}{_scalar(key)}: {_inline(value)}"
        if isinstance(value, list) and len(value) > 1 and len(line) > WIDTH:
            yield f"{indent}{_scalar(key)}:"
            yield from (f"{indent}  - {_scalar(v)}" for v in value)
        else:
            yield line


def _inline(value: Any) -> str:
    return f"[{', '.join(map(_scalar, value))}]" if isinstance(value, list) else _scalar(value)


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return str(value)
    plain = PLAIN.fullmatch(value) and value.lower() not in RESERVED
    return value if plain else f'"{"".join(map(_escaped, value))}"'


def _escaped(character: str) -> str:
    """Escapes a character for YAML, like JSON; JSON splits a character beyond U+FFFF in two."""
    number = ord(character)
    return json.dumps(character)[1:-1] if number < 0x10000 else f"\\U{number:08X}"
