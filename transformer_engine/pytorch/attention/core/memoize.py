"""Memoised pure functions: in a training loop each call costs one look-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from transformer_engine.pytorch.capture import is_capturing

P = ParamSpec("P")
R = TypeVar("R")

_MOST = 4096


def memoize(function: Callable[P, R]) -> Callable[P, R]:
    """Like `functools.lru_cache`, which torch.compile warns about; not used while compiling.

    Arguments are positional and hashable. Not memoised: errors, and results found while a CUDA
    graph is captured: libraries cannot be asked everything then.
    """
    results: dict[object, R] = {}

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        try:
            return results[args]
        except KeyError:
            pass
        if is_capturing():
            return function(*args, **kwargs)
        if len(results) >= _MOST:
            results.clear()
        results[args] = function(*args, **kwargs)
        return results[args]

    call.__name__ = function.__name__
    call.__doc__ = function.__doc__
    return call
