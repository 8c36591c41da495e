"""Which layer uses the cache of each layer number: two layers of a number would share tokens."""

from __future__ import annotations

import weakref
from typing import Any


class Owners:
    """The layers that use the caches of one `InferenceParams`, by their numbers."""

    def __init__(self) -> None:
        self._layers: dict[int | None, tuple[weakref.ref[Any], str]] = {}

    def claim(self, number: int | None, layer: Any, tokens: int) -> None:
        """Register the layer that uses the cache of a number; an empty cache may change its owner.

        Raises:
            ValueError: the cache has tokens of another layer.
        """
        own = weakref.ref(layer), layer.name
        owner, name = self._layers.setdefault(number, own)
        if owner() is layer:
            return
        if tokens:
            raise ValueError(
                f"[InferenceParams] expected one layer for each layer_number, got {number} of the"
                f" layers {name} and {layer.name}: give each layer of a model a number of its own"
            )
        self._layers[number] = own
