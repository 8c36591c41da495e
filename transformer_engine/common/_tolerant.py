"""`tolerant`: what constructors and assignments of recipes accept, and what their errors say."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import FrozenInstanceError, fields
from typing import Any, TypeVar

from nvdlfw_inspect.utils import refuse_misspelt

T = TypeVar("T", bound=type)


def tolerant(recipe: T) -> T:
    """Let a recipe's constructor accept unknown keywords, with one warning that names them.

    A keyword that is similar to a known one counts as misspelt, which is a TypeError.
    """
    strict_init = recipe.__init__  # type: ignore[misc]
    known = set(inspect.signature(strict_init).parameters)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        unknown = sorted(set(kwargs) - known)
        if unknown:
            refuse_misspelt(recipe.__name__, unknown, known)
            warnings.warn(
                f"{recipe.__name__}: ignoring unknown keyword(s) {', '.join(unknown)}",
                stacklevel=2,
            )
            kwargs = {k: v for k, v in kwargs.items() if k in known}
        strict_init(self, *args, **kwargs)

    __init__.__signature__ = inspect.signature(strict_init)  # type: ignore[attr-defined]
    recipe.__init__ = __init__  # type: ignore[misc]
    _explain_frozen(recipe)
    return recipe


def _explain_frozen(recipe: type) -> None:
    """Let the errors of assignments and deletions say what to write instead."""
    setting: Any = recipe.__setattr__
    deleting: Any = recipe.__delattr__

    def __setattr__(self: Any, name: str, value: Any) -> None:
        try:
            setting(self, name, value)
        except FrozenInstanceError:
            known = [one.name for one in fields(self) if one.init]
            instead = f"the fields of {type(self).__name__} are {', '.join(known)}"
            if name in known:
                instead = f"use recipe = dataclasses.replace(recipe, {name}={value!r})"
            raise _frozen(self, f"an assignment of {name}; {instead}") from None

    def __delattr__(self: Any, name: str) -> None:
        try:
            deleting(self, name)
        except FrozenInstanceError:
            raise _frozen(self, f"a deletion of {name}") from None

    recipe.__setattr__ = __setattr__  # type: ignore[method-assign, assignment]
    recipe.__delattr__ = __delattr__  # type: ignore[method-assign, assignment]


def _frozen(recipe: Any, got: str) -> FrozenInstanceError:
    kind = type(recipe).__name__
    return FrozenInstanceError(f"[{kind}] expected recipes to stay as they are, got {got}")
