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
from nvdlfw_inspect.excerpt import pointed
from nvdlfw_inspect.layer_names import assign_layer_names
from nvdlfw_inspect.loading import FeatureLoader
from nvdlfw_inspect.registry import Registry, import_built_in
from nvdlfw_inspect.report.table import count_of

EXAMPLES = """examples:
  python -m nvdlfw_inspect check config.yaml
  python -m nvdlfw_inspect check config.yaml --model my_package.model:build
  python -m nvdlfw_inspect check config.yaml --strict     # in CI: warnings are mistakes

The factory takes no arguments and returns a torch.nn.Module. Where it names all layers by `name=`,
they keep their names, else they get those of infer_and_assign_layer_names.
Exit code: 0 valid, 1 mistakes, 2 nothing to check or features missing."""
UNNAMED = re.compile(r"Layer_\d+(\.|$)")  # default names of layers that were given no name
NO_END = 2**63 - 1
Target = tuple[str, str, _engine.Schedule]  # gemm and tensor, "" if the feature names none
Plan = tuple[str, str, list[str], list[Target]]  # section, feature, layers, where it acts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("config", help="YAML file")
    parser.add_argument("--model", metavar="MODULE:FACTORY", help="show which layers are selected")
    parser.add_argument("--strict", action="store_true", help="exit with 1 for warnings, too")
    parser.add_argument(
        "--feature-dirs", nargs="*", default=[], metavar="DIR", help="folders of your own features"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints problems to stderr and the plan to stdout; returns the exit code."""
    path = Path(arguments.config)
    try:
        text = path.read_bytes()
        layers = _layers_of(arguments.model) if arguments.model else None
        config, missing, broken = _load(text, str(path), arguments.feature_dirs)
    except OSError as error:
        print(f"check: {error.filename or path}: {error.strerror or error}", file=sys.stderr)
        return 2
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        print(f"check: {str(error).removeprefix('[initialize] ')}", file=sys.stderr)
        return 2
    errors, unmatched = (config.errors, []) if config.errors else _try(config, layers or [])
    warnings = [*missing, *broken, *config.warnings, *unmatched]
    unsure = bool(missing and errors)  # the errors may be due to the missing features
    for kind, problems in (("warning", warnings), ("unsure" if unsure else "error", errors)):
        for problem in problems:
            print(f"{kind}: {pointed(problem, text)}", file=sys.stderr)
    if not errors:
        _print_plan(config, _engine.parse_yaml(text, str(path)) or {}, str(path), layers)
    if unsure:
        print(f"{path}: cannot be judged without the features that are missing", file=sys.stderr)
        return 2
    mistakes = [*errors, *warnings] if arguments.strict else errors
    if mistakes:
        print(f"{path}: {count_of(len(mistakes), 'mistake')}", file=sys.stderr)
    return int(bool(mistakes))


def _load(
    text: bytes, origin: str, directories: list[str]
) -> tuple[_engine.LoadedConfig, list[str], list[str]]:
    """The configuration, and messages about built-in features and files that cannot be loaded."""
    loader = FeatureLoader(directories)
    callouts = _engine.Callouts(Calls(loader.load))
    with loader.loading():
        failed = (import_built_in(), engine().discover(directories, callouts))
    missing, broken = (
        [f"{path} cannot be loaded: {reason}" for path, reason in each] for each in failed
    )
    return engine().load(text, origin), missing, broken


class _Heard(Calls):
    """Calls of a session that is only tried out: its warnings are stored instead of issued."""

    def __init__(self) -> None:
        super().__init__(lambda _: None)
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text.removeprefix("[config] "))


def _try(config: _engine.LoadedConfig, layers: list[str]) -> tuple[list[str], list[str]]:
    """Begin a session without logs, and route the calls of all layers, to find conflicts.

    No other session may be running.

    Returns:
        Messages about sections that conflict on a layer (of equal conflicts on several layers, the
        first one only), and warnings about sections that select no layer.
    """
    calls = _Heard()
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
        if layers:
            session.settle()
        return list(found.values()), calls.warnings
    finally:
        Registry.reset()


def _layers_of(factory: str) -> list[str]:
    """Names of the layers of a model that have GEMMs, in the order of its modules."""
    module_name, colon, name = factory.partition(":")
    if not (colon and name and all(part.isidentifier() for part in module_name.split("."))):
        raise ValueError(f"expected --model MODULE:FACTORY, got {factory!r}")
    sys.path.insert(0, "")
    model: Any = getattr(importlib.import_module(module_name), name)()
    if not hasattr(model, "modules"):
        raise TypeError(f"expected {factory} to return a torch.nn.Module, got {model!r}")
    names = _names(model)
    if any(UNNAMED.match(name) for name in names):
        assign_layer_names(model, lambda _: None)
        names = _names(model)
    return names


def _names(model: Any) -> list[str]:
    base = importlib.import_module("transformer_engine.pytorch.module.base")
    layers = [m for m in model.modules() if isinstance(m, base.TransformerEngineBaseModule)]
    return [name for layer in layers for name in layer.gemm_names]


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
        print(f"\nthe model: {count_of(len(layers), 'layer')}")
        for name in layers:
            print(f"    {name}")


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
