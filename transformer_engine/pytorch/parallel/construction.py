"""Layers that keep the arguments of their constructor, so that they can be rebuilt sharded."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from typing import Any, NoReturn

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
            try:
                bound = signature.bind_partial(module, *arguments, **keywords)
            except TypeError as error:
                _refuse(cls.__name__, signature, len(arguments), keywords, error)
            rest = [k for k, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD]
            found = dict(bound.arguments)
            for others in rest:
                found.update(found.pop(others, {}))
            left = {*_GROUPS, "self"}
            module.__dict__["_made_with"] = {k: v for k, v in found.items() if k not in left}
        return module


def unexpected_keywords(function: str, unknown: Iterable[str], known: Iterable[str]) -> str:
    """The message for unknown keywords, each with the known one that is most like it."""
    described, known = [], [*known]
    for name in sorted(unknown):
        near = difflib.get_close_matches(name, known, 1)
        described.append(f"{name} (did you mean {near[0]}?)" if near else name)
    return f"{function}() got unexpected keyword argument(s) {', '.join(described)}"


def _refuse(
    kind: str,
    signature: inspect.Signature,
    positional: int,
    keywords: dict[str, Any],
    error: TypeError,
) -> NoReturn:
    """Raise TypeError for arguments that a constructor does not take."""
    _, *parameters = signature.parameters.values()
    most = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    if positional > most:
        names = ", ".join(p.name for p in parameters[:most])
        raise TypeError(
            f"[{kind}] expected at most {most} positional arguments ({names}), got {positional}:"
            " give the others by name"
        ) from None
    known = [p.name for p in parameters]
    unknown = set(keywords) - set(known)
    if unknown:
        raise TypeError(unexpected_keywords(kind, unknown, known)) from None
    raise TypeError(f"[{kind}] {error}") from None


def made_with(module: Any) -> dict[str, Any] | None:
    """The arguments of a layer's constructor, by name; None if they are unknown."""
    return module.__dict__.get("_made_with") or None
