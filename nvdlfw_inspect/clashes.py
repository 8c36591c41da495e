"""What only the names of layers show: sections that exclude each other meet on a layer."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from nvdlfw_inspect import _engine
from nvdlfw_inspect.calls import Calls
from nvdlfw_inspect.engine import engine
from nvdlfw_inspect.registry import Registry

_NO_LOGS = _engine.LogOptions(
    directory="",
    rank=0,
    stamp="",
    append_text=True,
    append_rows=True,
    timestamps=False,
    level=logging.CRITICAL,
)


def clashes(config: _engine.LoadedConfig, layers: list[str]) -> list[str]:
    """Says what a training with these layers would stop at; of like clashes only the first.

    No session may be running: this begins one, without logs, and asks it as the layers would.
    """
    calls = Calls(lambda _: None)
    try:
        calls.instances = Registry.instantiate()
        session = engine().begin(config, _engine.Callouts(calls), _NO_LOGS)
        found: dict[str, str] = {}
        for layer in layers:
            for problem in _of_layer(session, layer):
                found.setdefault(problem.partition(" on layer ")[0], problem)
        return list(found.values())
    finally:
        Registry.reset()


def _of_layer(session: _engine.Session, layer: str) -> Iterator[str]:
    for namespace, data in Registry.data.items():
        for api in data.feat_api_to_features:
            try:
                session.route(namespace, api, layer, None, None)
            except ValueError as error:
                yield str(error).removeprefix("[config] ")
