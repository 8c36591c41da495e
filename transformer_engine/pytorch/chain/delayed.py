"""Gradients that a backward leaves for later, oldest first."""

from __future__ import annotations

from typing import Any


class Delayed(list[Any]):
    """What is `Unfinished` of a stage. It belongs to a graph: copies of a stage have nothing."""

    def __deepcopy__(self, memo: object) -> Delayed:
        return Delayed()

    def __reduce__(self) -> tuple[type[Delayed], tuple[()]]:
        return Delayed, ()
