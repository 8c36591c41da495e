"""Layers that know how they were made, so that they can be made again for several ranks."""

from __future__ import annotations

import inspect
from typing import Any

_GROUPS = frozenset({"tp_group", "cp_group", "cp_global_ranks", "cp_stream"})  # no copy has them


class Remakable:
    """Base of layers that ranks may share: keeps the arguments of its constructor.

    Subclasses elsewhere have constructors of their own; of those nothing is kept.
    """

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        """As of any object; the arguments are noted before the constructor runs."""
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
    """The arguments that made a layer, by name; None where they are not known."""
    return module.__dict__.get("_made_with") or None
