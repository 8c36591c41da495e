"""A small stand-in for `DebugManager`, for tests of hooks without configuration files."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from transformer_engine.debug.inspector import Inspector
from transformer_engine.pytorch.fp8.process_state import process_state

DEFAULTS = {"fp8_gemm_enabled": True}


class Routed(NamedTuple):
    feature: Any
    name: str
    section: str
    config: dict[str, Any]
    schedule: Any = None


class FakeManager:
    """Routes features by layer: `[(pattern, feature, {"tensors": [...], "gemms": [...]}), ...]`."""

    def __init__(self, *selected: tuple[str, Any, dict[str, Any]]) -> None:
        self.selected = selected
        self.iteration = 0
        self.messages: list[str] = []
        self._once: set[Any] = set()
        self._decided: dict[Any, tuple[int, int, Any]] = {}

    def route(self, namespace, layer_name, api_name, tensor_name=None, gemm=None):
        return tuple(
            Routed(feature, type(feature).__name__, "section", config)
            for pattern, feature, config in self.selected
            if re.search(pattern, layer_name)
            and hasattr(feature, api_name)
            and (tensor_name is None or tensor_name in config.get("tensors", [tensor_name]))
            and (gemm is None or gemm in config.get("gemms", [gemm]))
        )

    def decide(self, namespace, api_name, *, layer_name, iteration, **names):
        key = (api_name, layer_name, *sorted(names.items()))
        if key in self._decided:
            asked, until, answer = self._decided[key]
            if iteration < until:  # a positive answer holds for the iteration of the question only
                holds = iteration == asked or api_name == "fp8_gemm_enabled"
                return answer if holds else (False, answer[1])
        routed = self.route(
            namespace, layer_name, api_name, names.get("tensor_name"), names.get("gemm")
        )
        if not routed:
            return DEFAULTS.get(api_name, False), None
        arguments = {"layer_name": layer_name, "iteration": iteration, **names}
        answers = [
            a if isinstance(a, tuple) else (a, iteration + 1)
            for a in (_call(r, api_name, arguments) for r in routed)
        ]
        merge = all if api_name == "fp8_gemm_enabled" else any
        following = [n for _, n in answers if n is not None]
        answer = merge(a for a, _ in answers), min(following, default=None)
        self._decided[key] = (iteration, min(following, default=1 << 60), answer)
        return answer

    def active(self, iteration, namespace, api_name, layer, *target):
        return self.route(namespace, layer, api_name, *target)

    def call(self, namespace, api_name, *, layer_name, skip=lambda feature: False, **arguments):
        names = arguments.get("tensor_name"), arguments.get("gemm")
        routed = [
            r for r in self.route(namespace, layer_name, api_name, *names) if not skip(r.feature)
        ]
        results = [_call(r, api_name, {"layer_name": layer_name, **arguments}) for r in routed]
        return results[0] if api_name == "modify_tensor" else None

    def log_message(self, text, layer=None, level=20, once=None):
        if once is None or once not in self._once:
            self._once.add(once)
            self.messages.append(f"{layer}: {text}" if layer else text)


def _call(routed: Routed, name: str, arguments: dict[str, Any]) -> Any:
    method = getattr(routed.feature, name)
    known = inspect.signature(method).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        arguments = {k: v for k, v in arguments.items() if k in known}
    return method(routed.config, **arguments)


class Session:
    """A debugger session whose inspector the modules see."""

    def __init__(self, manager: FakeManager) -> None:
        self.manager = manager
        self.inspector = Inspector(manager)

    @property
    def plans(self) -> list[str]:
        return [m for m in self.manager.messages if ": Tensor: " in m]

    def step(self) -> None:
        self.manager.iteration += 1
        self.inspector.stepped()


@contextmanager
def session(*selected: tuple[str, Any, dict[str, Any]]) -> Iterator[Session]:
    opened = Session(FakeManager(*selected))
    process_state().inspector = opened.inspector
    try:
        yield opened
    finally:
        process_state().inspector = None
