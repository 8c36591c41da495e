"""Checks of arguments that have a single supported value."""

from __future__ import annotations

from typing import Any


def refuse_others(op: str, **arguments: tuple[Any, Any]) -> None:
    """Raise NotImplementedError for any `name=(value, supported value)` whose values differ."""
    for name, (value, only) in arguments.items():
        if value != only:
            raise NotImplementedError(
                f"[{op}] expected {name}={only!r}, the only one that is implemented, got {value!r}"
            )
