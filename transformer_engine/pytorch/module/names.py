"""Default names of layers, and checks of names."""

from __future__ import annotations

import itertools

_UNNAMED = itertools.count(1)


def layer_name(name: str | None, kind: str = "layer") -> str:
    """`name`, or `Layer_1`, `Layer_2`, ... in the order in which unnamed layers are made.

    Raises:
        TypeError: a name that is not a str; `kind` is for the message.
    """
    check_name(name, kind)
    return name or f"Layer_{next(_UNNAMED)}"


def check_name(name: object, kind: str) -> None:
    """Raise TypeError unless it is a str or None."""
    if not (name is None or isinstance(name, str)):
        raise TypeError(f"[{kind}] expected name to be a str or None, got {name!r}")
