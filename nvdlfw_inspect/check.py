"""`python -m nvdlfw_inspect check`: what is wrong with a configuration, and what it would do."""

from __future__ import annotations

import argparse
import importlib
import logging
import re
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from nvdlfw_inspect import _engine
from nvdlfw_inspect.calls import Calls
from nvdlfw_inspect.engine import engine
from nvdlfw_inspect.layer_names import assign_layer_names
from nvdlfw_inspect.loading import FeatureLoader
from nvdlfw_inspect.registry import Registry, import_built_in
from nvdlfw_inspect.report.table import count_of

EXAMPLES = """examples:
  python -m nvdlfw_inspect check config.yaml
  python -m nvdlfw_inspect check config.yaml --model my_package.model:build

The factory takes no arguments and returns a torch.nn.Module. Where it names all layers by `name=`,
they keep their names, else they get those of infer_and_assign_layer_names.
Exit code: 0 valid, 1 mistakes, 2 nothing to check."""
UNNAMED = re.compile(r"Layer_\d+(\.|$)")  # what layers are called that were given no name
NO_END = 2**63 - 1
Target = tuple[str, str, _engine.Schedule]  # gemm, tensor; empty: of no one in particular
Plan = tuple[str, str, list[str], list[Target]]  # section, feature, layers, where it acts


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
    except OSError as error:
        print(f"check: {error.filename or path}: {error.strerror or error}", file=sys.stderr)
        return 2
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    config = _load(text, str(path), arguments.feature_dirs)
    errors = config.errors or _clashes(config, layers or [])
    for warning in config.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for problem in errors:
        print(f"error: {problem}", file=sys.stderr)
    if errors:
        print(f"{path}: {count_of(len(errors), 'mistake')}", file=sys.stderr)
        return 1
    _print_plan(config, _engine.parse_yaml(text, str(path)) or {}, str(path), layers)
    return 0


def _load(text: bytes, origin: str, directories: list[str]) -> _engine.LoadedConfig:
    loader = FeatureLoader(directories)
    callouts = _engine.Callouts(Calls(loader.load))
    with loader.at_work():
        broken = [*import_built_in(), *engine().discover(directories, callouts)]
    for path, reason in broken:
        print(f"warning: {path} cannot be loaded: {reason}", file=sys.stderr)
    return engine().load(text, origin)


def _clashes(config: _engine.LoadedConfig, layers: list[str]) -> list[str]:
    """Where sections that exclude each other meet on a layer; of like clashes only the first.

    No session may be running: this begins one, without logs, and asks it as the layers would.
    """
    calls = Calls(lambda _: None)
    no_logs = _engine.LogOptions(
        directory="",
        rank=0,
        stamp="",
        append_text=True,
        append_rows=True,
        timestamps=False,
        level=logging.CRITICAL,
    )
    try:
        calls.instances = Registry.instantiate()
        session = engine().begin(config, _engine.Callouts(calls), no_logs)
        found: dict[str, str] = {}
        for layer, namespace in product(layers, Registry.data):
            for api in Registry.data[namespace].feat_api_to_features:
                try:
                    session.route(namespace, api, layer, None, None)
                except ValueError as error:
                    problem = str(error).removeprefix("[config] ")
                    found.setdefault(problem.partition(" on layer ")[0], problem)
        return list(found.values())
    finally:
        Registry.reset()


def _layers_of(factory: str) -> list[str]:
    """Names of the layers of a model that have GEMMs, in the order of its modules."""
    module_name, colon, name = factory.partition(":")
    if not (colon and name and all(part.isidentifier() for part in module_name.split("."))):
        raise ValueError(f"expected --model MODULE:FACTORY, got {factory!r}")
    sys.path.insert(0, "")
    model: Any = getattr(importlib.import_module(module_name), name)()
    names = _names(model)
    if any(UNNAMED.match(name) for name in names):
        assign_layer_names(model, lambda _: None)
        names = _names(model)
    return names


def _names(model: Any) -> list[str]:
    te = importlib.import_module("transformer_engine.pytorch")
    names: list[str] = []
    for module in model.modules():
        if isinstance(module, te.LayerNormMLP):
            names += [f"{module.name}.fc1", f"{module.name}.fc2"]
        elif isinstance(module, (te.Linear, te.LayerNormLinear)):
            names.append(str(module.name))
    return names


def _print_plan(
    config: _engine.LoadedConfig, sections: dict[str, Any], origin: str, layers: list[str] | None
) -> None:
    off = [name for name, body in sections.items() if body["enabled"] is not True]
    on = len(sections) - len(off)
    if not sections:
        print(f"{origin}: valid, no sections")
        return
    print(f"{origin}: valid, {on} of {count_of(len(sections), 'section')} enabled")
    plans = config.plans(layers or [])
    for line in _describe(plans, layers):
        print(line)
    for name in off:
        print(f"\n{name}: disabled")
    if layers is not None:
        for name in dict.fromkeys(plan[0] for plan in plans if not plan[2]):
            print(f"warning: {name}: selects no layer of the model", file=sys.stderr)


def _describe(plans: list[Plan], layers: list[str] | None) -> Iterator[str]:
    last = None
    for section, feature, selected, targets in plans:
        if section != last:
            yield ""
            if layers is None:
                yield f"{section}:"
            else:
                yield f"{section}: {len(selected)} of {count_of(len(layers), 'layer')}"
                yield from (f"    {name}" for name in selected)
        last = section
        yield f"  {feature}"
        yield from (f"    {line}" for line in _timetable(targets))


def _timetable(targets: list[Target]) -> list[str]:
    """Lines like `activation, weight in fprop: every 10 steps`, one for each schedule and gemm."""
    tensors: dict[tuple[str, str], list[str]] = {}
    for gemm, tensor, schedule in targets:
        tensors.setdefault((_steps(schedule), gemm), []).append(tensor)
    gemms: dict[tuple[str, str], list[str]] = {}
    for (steps, gemm), names in tensors.items():
        gemms.setdefault((steps, ", ".join(filter(None, names))), []).append(gemm)
    return [
        f"{' in '.join(filter(None, (names, ', '.join(filter(None, used))))) or 'all'}: {steps}"
        for (steps, names), used in gemms.items()
    ] or ["nothing"]


def _steps(schedule: _engine.Schedule) -> str:
    every = "every step" if schedule.freq == 1 else f"every {schedule.freq} steps"
    parts = [
        (f"from {start} on" if start else "") if end == NO_END else f"{start} to {end}"
        for start, end in schedule.intervals
    ]
    return f"{every}, {' and '.join(parts)}" if any(parts) else every
