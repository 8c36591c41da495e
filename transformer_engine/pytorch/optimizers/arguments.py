"""What optimizers of other libraries can and these cannot."""

from __future__ import annotations

from typing import Any


def refuse_others(op: str, **arguments: tuple[Any, Any]) -> None:
    """Raise NotImplementedError unless each `name=(value, the only supported one)` agrees."""
    for name, (value, only) in arguments.items():
        if value != only:
            raise NotImplementedError(
                f"[{op}] expected {name}={only!r}, the only one that is implemented, got {value!r}"
            )
