"""Layers that keep the arguments of their constructor, so that they can be rebuilt sharded."""

from __future__ import annotations

import inspect
from typing import Any

# Arguments that belong to one process: they are not kept.
_GROUPS = frozenset({"tp_group", "cp_group", "cp_global_ranks", "cp_stream"})


class Remakable:
    """Base of layers that ranks may share: keeps the arguments of its constructor.

    For subclasses outside of this package nothing is kept: their constructors are unknown.
    """

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        """Make the object, and keep the arguments before the constructor runs."""
        module = super().__new__(cls)
        constructor = cls.__init__
        if constructor.__module__.startswith("transformer_engine."):
            signature = inspect.signature(constructor)
            bound = signature.bind_partial(module, *arguments, **keywords)
            rest = [k for k, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD]
            found = dict(bound.arguments)
            for others in rest:
                found.update(found.pop(others, {}))
            left = {*_GROUPS, "self"}
            module.__dict__["_made_with"] = {k: v for k, v in found.items() if k not in left}
        return module


def made_with(module: Any) -> dict[str, Any] | None:
    """The arguments of a layer's constructor, by name; None if they are unknown."""
    return module.__dict__.get("_made_with") or None
