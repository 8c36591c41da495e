"""The output of a run: progress, the loss curve, and the comparison of precisions."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from gpt.training import Pace, Training

KINDS = ("fp8", "bf16", "fp32")
TOLERANCE = 0.01  # share of the bf16 loss by which FP8 may be worse
PLAIN_SECONDS = 5.0  # between two lines of progress


class Progress:
    """A progress bar if stderr is a terminal and tqdm is installed, else a line every few seconds.

    Use it as a context manager. Print with `say`, which does not disturb the bar.
    """

    def __init__(self, training: Training) -> None:
        settings = training.settings
        self.label, self.steps, self.start = settings.label, settings.steps, training.done
        self.bar = None
        if sys.stderr.isatty() and importlib.util.find_spec("tqdm"):
            from tqdm import tqdm  # noqa: PLC0415, an optional package

            self.bar = tqdm(total=self.steps, initial=self.start, desc=self.label, unit="step")
        self.began = self.spoke = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def update(self, done: int, pace: Pace) -> None:
        """Show where the run is."""
        facts = f"loss {pace.loss:.3f}, {pace.tokens_per_second:,.0f} tokens/s"
        if self.bar is not None:  # tqdm adds the remaining time
            self.bar.set_postfix_str(facts, refresh=False)
            self.bar.update(done - self.bar.n)
            return
        now = time.monotonic()
        if now - self.spoke < PLAIN_SECONDS and done < self.steps:
            return
        self.spoke = now
        remaining = (now - self.began) / (done - self.start) * (self.steps - done)
        self.say(f"{self.label}: step {done}/{self.steps}, {facts}, {remaining:.0f} s left")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self.bar is None:
            print(line, flush=True)
        else:
            self.bar.write(line, file=sys.stdout)


def in_bits(nats: float) -> str:
    """A loss in nats and in bits per byte."""
    return f"{nats:.4f} nats/byte ({nats / math.log(2):.3f} bits)"


def readable(text: bytes) -> str:
    """Text for a terminal: characters that cannot be printed become question marks."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in decoded)


@dataclass(frozen=True)
class Outcome:
    """The results of a run; `gemms` counts the GEMMs by precision."""

    label: str
    losses: list[float]
    validation: list[tuple[int, float]]
    seconds: float
    gemms: dict[str, int]

    @property
    def final(self) -> float:
        """The last validation loss."""
        return self.validation[-1][1]


def comparison(outcomes: Sequence[Outcome], bigram: float) -> tuple[str, bool]:
    """A text with table and verdict, and whether FP8 reaches the loss of bf16.

    The loss of FP8 may be larger than that of bf16 by the share `TOLERANCE` or, if that is more, by
    the spread of the bf16 losses over the seeds.
    """
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.label, []).append(outcome)
    reference = [outcome.final for outcome in groups["bf16"]]
    spread = max(reference) - min(reference)
    allowed = max(TOLERANCE * mean(reference), spread)
    header = f"{'':<12} {'validation':>10} {'seeds from .. to':>18} {'to bf16':>8} {'seconds':>8}"
    lines = [header + "".join(f" {kind + ' GEMMs':>11}" for kind in KINDS)]
    verdicts, kept_up = [], True
    for label, runs in groups.items():
        finals = [run.final for run in runs]
        change = mean(finals) - mean(reference)
        percent = f"{change / mean(reference):+.2%}"
        span = f"{min(finals):.4f} .. {max(finals):.4f}"
        lines.append(
            f"{label:<12} {mean(finals):>10.4f} {span:>18} {percent:>8} "
            f"{mean(run.seconds for run in runs):>8.0f}"
            + "".join(f" {sum(run.gemms[kind] for run in runs):>11,}" for kind in KINDS)
        )
        if label != "bf16":
            words = "keeps up" if change <= allowed else "FALLS BEHIND"
            if any(run.gemms["bf16"] or run.gemms["fp32"] for run in runs):
                words = "RAN GEMMS IN HIGHER PRECISION"
            kept_up &= words == "keeps up"
            verdicts.append(f"{label} {words} ({percent})")
    lines.append(f"{'bigram':<12} {bigram:>10.4f}")
    limit = "the spread of the bf16 seeds" if spread == allowed else f"{TOLERANCE:.0%} of bf16"
    if len(reference) == 1:
        limit += "; --seeds 3 shows how far seeds lie apart"
    lines.append(f"verdict, allowed {allowed:.4f} ({limit}): {'; '.join(verdicts)}")
    return "\n".join(lines), kept_up


def plot(outcomes: Sequence[Outcome], bigram: float, path: Path) -> str:
    """Draw the loss curves into a file; returns a line that says where, or why not."""
    if not importlib.util.find_spec("matplotlib"):
        return "no loss curve: matplotlib is not installed (pip install matplotlib)"
    from matplotlib.figure import Figure  # noqa: PLC0415, an optional package

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="nats per byte")
    labels = list(dict.fromkeys(outcome.label for outcome in outcomes))
    for outcome in outcomes:
        colour = f"C{labels.index(outcome.label)}"
        axes.plot(*zip(*outcome.validation, strict=True), color=colour, marker=".")
        if len(labels) == 1:  # curves of several precisions would hide each other
            steps = range(1, len(outcome.losses) + 1)
            axes.plot(steps, outcome.losses, color=colour, linewidth=0.5, alpha=0.4)
    for i, label in enumerate(labels):
        axes.plot([], [], color=f"C{i}", marker=".", label=label)
    axes.axhline(bigram, color="gray", linestyle="--", label="bigram entropy")
    lowest = min(loss for outcome in outcomes for _, loss in outcome.validation)
    axes.set_ylim(0.9 * min(lowest, bigram), 1.3 * max(lowest, bigram))  # without the first drop
    axes.set_title("Validation loss" + (", and training loss (thin)" if len(labels) == 1 else ""))
    axes.legend()
    figure.savefig(path, dpi=120)
    return f"loss curve: {path}"
