"""Hooks that run during warm-up and around a capture; they are never part of a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_KINDS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
_WITH_KWARGS = "_with_kwargs"
_KEYS = (*_KINDS, *[kind + _WITH_KWARGS for kind in _KINDS[:2]])


class _Hook(NamedTuple):
    function: Callable[..., Any]
    takes_kwargs: bool


class CaptureTimeHooks:
    """The hooks of one callable; their arguments are those of torch's hooks of modules.

    Args:
        hooks: `{kind: {key: hook}}`, kinds as in `make_graphed_callables`.
        where: which callable, for errors.

    Raises:
        TypeError: not a mapping.
        ValueError: an unknown kind.
    """

    def __init__(self, hooks: Mapping[str, Mapping[Any, Any]] | None, where: str) -> None:
        self.where = where
        if not isinstance(hooks or {}, Mapping):
            raise TypeError(
                "[make_graphed_callables] expected capture_time_hooks to be a mapping or None for"
                f" each callable, got {type(hooks).__name__} for {where}"
            )
        found: dict[str, Mapping[Any, Any]] = dict(hooks or {})
        for key in found:
            if key not in _KEYS:
                raise ValueError(
                    f"[make_graphed_callables] expected capture_time_hooks of {', '.join(_KEYS)},"
                    f" got {key!r} for {where}"
                )
        self._hooks = {
            kind: [
                _Hook(hook, bool(found.get(kind + _WITH_KWARGS, {}).get(key)))
                for key, hook in found.get(kind, {}).items()
            ]
            for kind in _KINDS
        }

    def run(self, kind: str, *first: Any, kwargs: Any = None, last: Sequence[Any] = ()) -> None:
        """`hook(*first, *last)`, or `hook(*first, kwargs, *last)`, of each hook of a kind."""
        for hook in self._hooks[kind]:
            named = (kwargs,) if hook.takes_kwargs else ()
            if hook.function(*first, *named, *last) is not None:
                raise ValueError(
                    "[make_graphed_callables] expected hooks of a capture to return None, as"
                    f" replays do not run them, got a value from {hook.function} ({self.where})"
                )


def capture_time_hooks_of(
    hooks: Sequence[Mapping[str, Mapping[Any, Any]] | None] | None, places: Sequence[str]
) -> list[CaptureTimeHooks]:
    """The hooks of each callable.

    Raises:
        ValueError: hooks for another number of callables.
    """
    every = [None] * len(places) if hooks is None else list(hooks)
    if len(every) != len(places):
        raise ValueError(
            "[make_graphed_callables] expected capture_time_hooks for each of"
            f" {len(places)} callable(s), got {len(every)}"
        )
    return [CaptureTimeHooks(*one) for one in zip(every, places, strict=True)]
