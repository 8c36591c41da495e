"""Reads the logs of a debugger session, and makes sections of a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def messages(log_dir: Path) -> list[str]:
    """Returns the lines of the debug log."""
    return (
        (log_dir / "nvdlfw_inspect_logs/nvdlfw_inspect_globalrank-0.log").read_text().splitlines()
    )


def statistics(log_dir: Path) -> list[str]:
    """Returns the lines of the statistics log."""
    name = "nvdlfw_inspect_statistics_logs/nvdlfw_inspect_globalrank-0.log"
    return (log_dir / name).read_text().splitlines()


def rows(log_dir: Path) -> list[dict[str, Any]]:
    """Returns the records of the JSON lines."""
    return [json.loads(s) for s in (log_dir / "statistics_rank-0.jsonl").read_text().splitlines()]


def section(
    feature: str, layers: str = "fc1", namespace: str = "ns", **keys: Any
) -> dict[str, Any]:
    """Returns a section with one feature."""
    return {
        "enabled": True,
        "layers": {"layer_types": [layers]},
        namespace: {feature: {"enabled": True, **keys}},
    }
