"""The table of figures in `docs/reliability.md`, from `results/*.json`."""

from __future__ import annotations

import json
import os
from typing import Any

from outcome import RESULTS, ROOT

PAGE = ROOT / "docs/reliability.md"
_BEGIN, _END = "<!-- figures: python tools/soak/table.py writes them -->\n", "<!-- end -->\n"
_NOT_COUNTED = "refused by us alone", "read by us alone"


def write() -> None:
    """Write the table into the page, unless results go to another folder (TE_SOAK_RESULTS)."""
    if "TE_SOAK_RESULTS" in os.environ:
        return
    page = PAGE.read_text()
    before, rest = page.split(_BEGIN)
    PAGE.write_text(before + _BEGIN + table() + _END + rest.split(_END)[1])


def table() -> str:
    """A Markdown table with a row for each test that has figures."""
    lines = [
        "| `make soak ARGS=` | figures | failures | on | when |",
        "| --- | --- | --- | --- | --- |",
    ]
    for path in sorted(RESULTS.glob("*.json")):
        found = json.loads(path.read_text())
        when = f"{found['date']}, {found['commit']}"
        told = ", ".join(_figures(found["figures"]))
        command = found.get("command", path.stem)
        lines.append(
            f"| `{command}` | {told} | {found['failures']} | {found['machine']} | {when} |"
        )
    return "\n".join(lines) + "\n"


def _figures(figures: dict[str, Any]) -> list[str]:
    """The figures as texts; the figures of all reasons of a disagreement are added up."""
    told = {name: value for name, value in figures.items() if ": " not in name}
    for kind in _NOT_COUNTED:
        total = sum(value for name, value in figures.items() if name.startswith(f"{kind}: "))
        if total:
            told[f"{kind}, explained"] = total
    return [f"{value:,} {name}" for name, value in told.items()]


if __name__ == "__main__":
    write()
