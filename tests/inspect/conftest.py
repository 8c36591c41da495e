"""Fixtures: debugger sessions that end with their test, and a pretended notebook."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nvdlfw_inspect.api as debug_api
from nvdlfw_inspect.debug_manager import DebugManager
from nvdlfw_inspect.registry import Registry, _forget, import_built_in


@pytest.fixture(autouse=True)
def _clean_engine() -> Iterator[None]:
    """Ends the session after each test, and forgets feature classes that the test registered."""
    import_built_in()
    before = set(Registry._classes)
    yield
    debug_api.end_debug()
    for id in set(Registry._classes) - before:
        _forget(id)


@pytest.fixture
def initialize(tmp_path: Path) -> Callable[..., DebugManager]:
    """`debug_api.initialize` with logs in `tmp_path`, without time stamps; returns the manager."""

    def start(config: Any = None, **kwargs: Any) -> DebugManager:
        settings = {"log_dir": tmp_path, "log_timestamps": False, **kwargs}
        debug_api.initialize(config, **settings)
        assert debug_api.DEBUG_MANAGER is not None
        return debug_api.DEBUG_MANAGER

    return start


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process look like a notebook's kernel."""
    shell = types.SimpleNamespace(kernel=object())
    module = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", module)
