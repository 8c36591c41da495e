"""The debug engine of the process, in C++: it knows all features, and begins sessions."""

from __future__ import annotations

from functools import cache

from nvdlfw_inspect import _engine


@cache
def engine() -> _engine.Engine:
    """Return the engine."""
    return _engine.Engine()
