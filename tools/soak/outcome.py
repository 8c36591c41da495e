"""The outcome of a soak test: figures that are written to `results/`, and failures."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(os.environ.get("TE_SOAK_RESULTS") or Path(__file__).with_name("results"))
_SHOWN = 50


@dataclass
class Outcome:
    """The figures and failures of one soak test.

    Attributes:
        name: name of the test.
        figures: counts, which are integers, and largest values, which are floats.
        failures: descriptions of failures, with what is needed to reproduce them.
    """

    name: str
    figures: dict[str, int | float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def count(self, what: str, by: int = 1) -> None:
        """Add to a count."""
        self.figures[what] = self.figures.get(what, 0) + by

    def most(self, what: str, value: float) -> None:
        """Keep the largest value."""
        self.figures[what] = round(max(self.figures.get(what, 0.0), float(value)), 3)

    def add(self, other: Outcome) -> None:
        """Add the figures and failures of another process."""
        for what, value in other.figures.items():
            if isinstance(value, float):
                self.most(what, value)
            else:
                self.count(what, value)
        self.failures += other.failures

    def write(self, command: str) -> Path:
        """Write the figures to a file of `results/` for `docs/reliability.md`; returns its path."""
        under = os.environ.get("TE_SOAK_UNDER", "")
        found = {
            "date": time.strftime("%Y-%m-%d"),
            "commit": _commit(),
            "machine": _machine(self.name.endswith("_cuda")) + (f" under {under}" if under else ""),
            "command": command,
            "figures": self.figures,
            "failures": len(self.failures),
        }
        RESULTS.mkdir(parents=True, exist_ok=True)
        path = RESULTS / f"{self.name}{'_sanitized' if under else ''}.json"
        path.write_text(json.dumps(found, indent=2) + "\n")
        return path

    def show(self) -> None:
        """Print figures and failures."""
        told = ", ".join(f"{value:,} {what}" for what, value in self.figures.items())
        print(f"{self.name}: {told}; {len(self.failures)} failures", flush=True)
        for failure in self.failures[:_SHOWN]:
            print(f"  {failure}")


def until(seconds: float, least: int = 1) -> Iterator[int]:
    """Yield numbers of rounds until the time is up, but at least `least` of them."""
    end, number = time.monotonic() + seconds, 0
    while number < least or time.monotonic() < end:
        yield number
        number += 1


def _commit() -> str:
    if commit := os.environ.get("TE_BENCH_COMMIT"):  # of a tree without its .git
        return commit
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return ran.stdout.strip() or "unknown"


def _machine(gpu: bool) -> str:
    if gpu:
        import torch  # noqa: PLC0415 - the parser's test needs none

        return str(torch.cuda.get_device_name())
    return f"{platform.machine()} CPU, {os.cpu_count()} processors"
