"""Whether the host decides how long a call takes, or a CUDA graph is being captured.

Also functions that remember what they found outside of captures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

HOST_BOUND_BYTES = 16 * 1024 * 1024  # of the first input: up to it the host takes longer
_MOST_RESULTS = 4096


class NotRecordedError(RuntimeError):
    """Raised while a call is recorded, by what cannot be; its text says what that is."""


def is_capturing() -> bool:
    """Whether the current stream of the current device is captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_host_bound(first: torch.Tensor) -> bool:
    """Whether the host decides the time of a call with this first input."""
    return first.numel() * first.itemsize <= HOST_BOUND_BYTES  # strides may be symbols


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
        if len(results) >= _MOST_RESULTS:
            results.clear()
        results[args] = function(*args, **kwargs)
        return results[args]

    call.__name__ = function.__name__
    call.__doc__ = function.__doc__
    return call
