"""What a soak test found: figures that go into `results/`, and failures that end it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results")
_SHOWN = 5


@dataclass
class Outcome:
    """Of one soak test.

    Attributes:
        name: of the test.
        figures: counts and times, in the order of the table.
        failures: what must not happen, each in words that reproduce it.
    """

    name: str
    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def count(self, what: str, by: int = 1) -> None:
        """Add to a count."""
        self.figures[what] = self.figures.get(what, 0) + by

    def most(self, what: str, value: float) -> None:
        """Keep the largest value."""
        self.figures[what] = round(max(self.figures.get(what, 0.0), value), 3)

    def write(self) -> None:
        """Put the figures where `docs/reliability.md` gets them from."""
        commit = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
        about = {"date": time.strftime("%Y-%m-%d"), "commit": commit, "machine": _machine()}
        found = {**about, "figures": self.figures, "failures": len(self.failures)}
        (RESULTS / f"{self.name}.json").write_text(json.dumps(found, indent=2) + "\n")

    def show(self) -> None:
        """Print it."""
        told = ", ".join(f"{value:,} {what}" for what, value in self.figures.items())
        print(f"{self.name}: {told}; {len(self.failures)} failures", flush=True)
        for failure in self.failures[:_SHOWN]:
            print(f"  {failure}")


def until(seconds: float, least: int = 1) -> Iterator[int]:
    """Numbers of rounds, for so long, and at least so many."""
    end, number = time.monotonic() + seconds, 0
    while number < least or time.monotonic() < end:
        yield number
        number += 1


def _machine() -> str:
    import torch  # noqa: PLC0415 - the parser's test needs none

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    under = os.environ.get("TE_SOAK_UNDER", "")
    return platform.machine() + " CPU" + (f" under {under}" if under else "")
