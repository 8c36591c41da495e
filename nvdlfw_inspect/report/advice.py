"""What to do about findings: one piece of advice for each rule and tensor, with the YAML that acts.

Every piece of YAML is a whole section of a config file and can be used alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from nvdlfw_inspect.report.combine import Features, combine
from nvdlfw_inspect.report.records import Run
from nvdlfw_inspect.report.rules import RULES, Finding, Level
from nvdlfw_inspect.report.table import count_of
from nvdlfw_inspect.report.verdicts import Verdicts

LOOK_BACK = 10  # steps before a NaN that are worth seeing
Config = dict[str, Any]


@dataclass(frozen=True)
class Advice:
    """All findings of one rule about one kind of tensor, and what to do about them."""

    level: Level
    title: str  # what is wrong, in one line
    text: str  # why, and what helps
    findings: list[Finding]  # the worst first
    features: Features  # what acts on it
    act_on: list[str]  # the layers on which they act

    @property
    def yaml(self) -> str:
        """A section of a config file."""
        subject = self.findings[0].subject
        parts = (self.findings[0].rule.name, subject.statistic.recipe, subject.key.tensor)
        name = re.sub(r"\W", "_", "_".join(filter(None, parts)))
        return to_yaml({name: _section(self.act_on, self.features, subject.run)})

    @property
    def layers(self) -> list[str]:
        """The layers concerned, the worst first."""
        return list(dict.fromkeys(f.subject.key.layer for f in self.findings))


class Told(NamedTuple):
    """What a rule's advice says, and the features that act on it."""

    title: str
    text: str
    features: Features
    layers: list[str] | None = None  # all layers concerned


def advise(verdicts: Verdicts) -> list[Advice]:
    """Gathers the findings of a run into pieces of advice, the most urgent first."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in verdicts.findings:
        tensor = "" if finding.rule.name == "non-finite" else finding.subject.key.tensor
        recipe = finding.subject.statistic.recipe
        groups.setdefault((finding.rule.name, tensor, recipe), []).append(finding)
    advice = [_advice(findings) for findings in groups.values()]
    urgency = [rule.name for rule in RULES]
    return sorted(
        advice, key=lambda a: (-a.level, urgency.index(a.findings[0].rule.name), -len(a.layers))
    )


def headline(verdicts: Verdicts, advice: list[Advice]) -> str:
    """Says in one sentence what is wrong with a run."""
    if advice:
        return advice[0].title
    run = verdicts.run
    return f"Nothing stands out in {count_of(len(run.layers), 'layer')}"


def combined_yaml(advice: list[Advice]) -> str:
    """Returns one config that acts on all advice; no layer stands in two of its sections."""
    run = advice[0].findings[0].subject.run
    sections = combine((piece.act_on, piece.features) for piece in advice)
    return to_yaml(
        {
            f"advice_{i}": _section(layers, features, run)
            for i, (layers, features) in enumerate(sections, 1)
        }
    )


def _advice(findings: list[Finding]) -> Advice:
    worst = findings[0]
    told = TELL[worst.rule.name](findings)
    layers = told.layers or list(dict.fromkeys(f.subject.key.layer for f in findings))
    features = {feature: {"enabled": True, **keys} for feature, keys in told.features.items()}
    return Advice(worst.level, told.title, told.text, findings, features, layers)


def _section(layers: list[str], features: Features, run: Run) -> Config:
    everywhere = len(layers) > 1 and len(layers) == len(run.layers)
    selector = {"layer_types": ["all"]} if everywhere else {"exact_layer_names": layers}
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
    text = (
        f"First seen in {statistic} of {tensor}, in the order in which a step computes, and in"
        f" {_where(findings)} altogether. "
    )
    if tensor in {"activation", "gradient"}:
        neighbour = "before" if tensor == "activation" else "after"
        text += f"The layer is given this tensor: look at what comes {neighbour} it, too. "
    text += (
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
    return Told(f"{what} in {layer} since step {first.step:,}", text, features, [layer])


def _tell_share(verb: str, cause: str) -> Callable[[list[Finding]], Told]:
    def tell(findings: list[Finding]) -> Told:
        worst = findings[0]
        tensor, recipe = worst.subject.key.tensor, worst.subject.statistic.recipe
        share = max(f.value for f in findings)
        title = f"Up to {share:.3g} % of the {tensor} {verb} in {_where(findings)}"
        title += f" with {recipe}" if recipe else ""
        gemms = _gemms(findings)
        if all(map(_at_the_start_alone, findings)):
            text = (
                f"{cause} Only the first step shows it, when delayed scaling has no history yet: it"
                " is harmless unless it comes back."
            )
            watch = {"stats": [worst.subject.key.statistic], "tensors": [tensor], "freq": 10}
            title += f", at step {worst.step:,} alone"
            return Told(title, text, {"LogFp8TensorStats": watch})
        helped = _current_scaling(findings)
        if helped is not None:
            text = f"{cause} With current scaling it would be {helped:.3g} % at the most."
            scaling = {"gemms": gemms, "tensors": [tensor]}
            return Told(title, text, {"PerTensorScaling": scaling})
        text = f"{cause} Run the GEMMs that read this tensor in high precision."
        return Told(title, text, {"DisableFP8GEMM": {"gemms": gemms}})

    return tell


def _at_the_start_alone(finding: Finding) -> bool:
    first, *later = finding.subject.series.values
    return finding.step == 0 and bool(later) and first > finding.rule.watch >= max(later)


def _current_scaling(findings: list[Finding]) -> float | None:
    """The worst value with current scaling, where that was logged beside and is good enough."""
    rule, base = findings[0].rule, findings[0].subject.statistic.base
    what_if = [f.subject.beside(base, "fp8_current_scaling") for f in findings]
    if findings[0].subject.statistic.recipe or None in what_if:
        return None
    worst = max(max(s.values) for s in what_if if s)
    return worst if worst <= rule.watch else None


def _tell_dead(findings: list[Finding]) -> Told:
    tensor = findings[0].subject.key.tensor
    text = (
        "Nothing flows here: a layer that is not used, a mask or activation that closes, or"
        " values that underflow before they arrive. See where the zeros begin."
    )
    watch = {"stats": ["cur_amax", "l2_norm"], "tensors": ["activation", "weight", "gradient"]}
    return Told(f"The {tensor} is all zero in {_where(findings)}", text, {"LogTensorStats": watch})


def _tell_noise(findings: list[Finding]) -> Told:
    tensor = findings[0].subject.key.tensor
    text = (
        "Rounding to FP8 leaves little of the signal, mostly because a few large values set the"
        " scale for all. Run the GEMMs that read this tensor in high precision."
    )
    title = f"The {tensor} drowns in rounding noise in {_where(findings)}"
    return Told(title, text, {"DisableFP8GEMM": {"gemms": _gemms(findings)}})


def _tell_growth(findings: list[Finding]) -> Told:
    worst = findings[0]
    tensor = worst.subject.key.tensor
    growth = worst.severity * worst.rule.watch
    text = (
        "Delayed scaling takes its scale from the steps before: a jump saturates. Scale by the"
        " tensor in hand instead, or clip what makes it jump."
    )
    title = f"The {tensor} jumps by a factor of {growth:,.3g} in {_where(findings)}"
    gemms = _gemms(findings)
    if not gemms:  # a result, which FP8 does not round
        return Told(title, text, {"LogTensorStats": {"stats": ["cur_amax"], "tensors": [tensor]}})
    return Told(title, text, {"PerTensorScaling": {"gemms": gemms, "tensors": [tensor]}})


def _tell_range(findings: list[Finding]) -> Told:
    tensor = findings[0].subject.key.tensor
    text = (
        "The smallest values round to zero whatever the scale. That is harmless where they are"
        " few: log how many there are."
    )
    title = f"The {tensor} spans more bits than its FP8 format holds in {_where(findings)}"
    watch = {"stats": ["underflows%"], "tensors": [tensor], "freq": 10}
    return Told(title, text, {"LogFp8TensorStats": watch})


TELL: dict[str, Callable[[list[Finding]], Told]] = {
    "non-finite": _tell_not_finite,
    "overflow": _tell_share("saturates", "The scale is too small for the largest values."),
    "underflow": _tell_share("becomes zero", "The smallest values lie below what FP8 can hold."),
    "dead": _tell_dead,
    "noise": _tell_noise,
    "growth": _tell_growth,
    "range": _tell_range,
}
PLAIN = re.compile(r"[A-Za-z_][\w.%/-]*")
WIDTH = 56  # of a line that the page shows whole
RESERVED = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


def to_yaml(config: Config) -> str:
    """Writes what a config file may hold: mappings, lists of scalars and scalars.

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
    return value if plain else json.dumps(value)
