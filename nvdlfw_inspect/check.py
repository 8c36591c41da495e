"""`python -m nvdlfw_inspect check`: what is wrong with a configuration, and what it would do."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nvdlfw_inspect import _engine
from nvdlfw_inspect.calls import Calls
from nvdlfw_inspect.engine import engine
from nvdlfw_inspect.layer_names import assign_layer_names
from nvdlfw_inspect.loading import FeatureLoader
from nvdlfw_inspect.registry import import_built_in

HELP = "validate a configuration and print what it would do, without training"
EXAMPLES = """examples:
  python -m nvdlfw_inspect check config.yaml
  python -m nvdlfw_inspect check config.yaml --model my_package.model:build

The factory takes no arguments and returns a torch.nn.Module; its layers get the names that
infer_and_assign_layer_names gives them. Exit code: 0 valid, 1 mistakes, 2 nothing to check."""
NO_END = 2**63 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("config", help="YAML file")
    parser.add_argument("--model", metavar="MODULE:FACTORY", help="show which layers are selected")
    parser.add_argument(
        "--feature-dirs", nargs="*", default=[], metavar="DIR", help="folders of your own features"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints problems to stderr and the plan to stdout; returns the exit code."""
    path = Path(arguments.config)
    try:
        text = path.read_bytes()
        layers = _layers_of(arguments.model) if arguments.model else None
    except (OSError, ImportError, AttributeError, ValueError) as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    config = _load(text, str(path), arguments.feature_dirs)
    for warning in config.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for problem in config.errors:
        print(f"error: {problem}", file=sys.stderr)
    if config.errors:
        return 1
    for line in _describe(config, layers):
        print(line)
    return 0


def _load(text: bytes, origin: str, directories: list[str]) -> _engine.LoadedConfig:
    loader = FeatureLoader(directories)
    callouts = _engine.Callouts(Calls(loader.load))
    with loader.at_work():
        broken = [*import_built_in(), *engine().discover(directories, callouts)]
    for path, reason in broken:
        print(f"warning: {path} cannot be loaded: {reason}", file=sys.stderr)
    return engine().load(text, origin)


def _layers_of(factory: str) -> list[str]:
    """Names of the layers of a model that have GEMMs, in the order of its modules."""
    module_name, colon, name = factory.partition(":")
    if not colon:
        raise ValueError(f"expected --model MODULE:FACTORY, got {factory!r}")
    sys.path.insert(0, "")
    model: Any = getattr(importlib.import_module(module_name), name)()
    assign_layer_names(model, lambda _: None)
    te = importlib.import_module("transformer_engine.pytorch")
    names: list[str] = []
    for module in model.modules():
        if isinstance(module, te.LayerNormMLP):
            names += [f"{module.name}.fc1", f"{module.name}.fc2"]
        elif isinstance(module, (te.Linear, te.LayerNormLinear)):
            names.append(str(module.name))
    return names


def _describe(config: _engine.LoadedConfig, layers: list[str] | None) -> Iterator[str]:
    plans = config.plans(layers or [])
    if not plans:
        yield "no enabled feature"
    last = None
    for section, feature, selected, targets in plans:
        if section != last:
            yield f"{section}:"
            if layers is not None:
                yield f"  selects {len(selected)} of {len(layers)} layers"
                yield from (f"    {name}" for name in selected)
        last = section
        yield f"  {feature}"
        for gemm, tensor, schedule in targets:
            where = " in ".join(filter(None, (tensor, gemm))) or "everything"
            yield f"    {where}: {_steps(schedule)}"
        if not targets:
            yield "    nothing"


def _steps(schedule: _engine.Schedule) -> str:
    every = "every step" if schedule.freq == 1 else f"every {schedule.freq} steps"
    parts = [
        (f"from {start} on" if start else "") if end == NO_END else f"{start} to {end}"
        for start, end in schedule.intervals
    ]
    return f"{every}, {' and '.join(parts)}" if any(parts) else every
