"""What optimizers of other libraries can and these cannot."""

from __future__ import annotations

from typing import Any


def refuse_others(op: str, **arguments: tuple[Any, Any]) -> None:
    """Check arguments `name=(value, the only one that is implemented)`.

    Raises:
        NotImplementedError: for the first that has another value.
    """
    for name, (value, only) in arguments.items():
        if value != only:
            raise NotImplementedError(
                f"[{op}] expected {name}={only!r}, the only one that is implemented, got {value!r}"
            )
