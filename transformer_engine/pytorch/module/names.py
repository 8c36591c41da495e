"""Names of layers that were given none."""

from __future__ import annotations

import itertools

_UNNAMED = itertools.count(1)


def layer_name(name: str | None) -> str:
    """`name`, or `Layer_1`, `Layer_2`, ... in the order in which unnamed layers are made."""
    return name or f"Layer_{next(_UNNAMED)}"
