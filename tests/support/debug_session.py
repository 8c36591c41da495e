"""Helpers that run a debugger session from a configuration, and read what it logged."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api

Config = dict[str, Any]
Logged = dict[tuple[int, str, str], dict[str, float | None]]

SIX = ["activation", "gradient", "weight", "output", "wgrad", "dgrad"]


def section(feature: str, layers: str = ".", **body: Any) -> Config:
    """Returns a section with one feature, for the layers whose names match a pattern."""
    return {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": layers},
        "transformer_engine": {feature: {"enabled": True, **body}},
    }


@contextmanager
def debugging(folder: Path, *sections: Config, **more: Any) -> Iterator[None]:
    """Runs a debugger session with these sections."""
    config = {f"section{i}": body for i, body in enumerate(sections)}
    debug_api.initialize(config_file=config or None, log_dir=folder, **more)
    try:
        yield
    finally:
        debug_api.end_debug()


def logged(folder: Path, rank: int = 0) -> Logged:
    """Returns the JSON lines as `{(iteration, layer, tensor): {statistic: value}}`."""
    found: Logged = {}
    for line in (folder / f"statistics_rank-{rank}.jsonl").read_text().splitlines():
        row = json.loads(line)
        value = row["value"]
        key = (row["iteration"], row["layer"], row["tensor"])
        found.setdefault(key, {})[row["statistic"]] = None if value is None else float(value)
    return found


def inspect(layer: str, tensor: str, x: Any, **more: Any) -> None:
    """Calls `inspect_tensor` as the hooks of a layer do."""
    iteration = debug_api.DEBUG_MANAGER.iteration
    debug_api.transformer_engine.inspect_tensor(
        layer_name=layer,
        tensor_name=tensor,
        tensor=x,
        iteration=iteration,
        **{"tp_group": None, **more},
    )
