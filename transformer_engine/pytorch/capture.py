"""What limits a call: whether a CUDA graph is being captured, and whether it is host-bound.

Also `memoize`, which caches results of functions, but none that were found during a capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

HOST_BOUND_BYTES = 16 * 1024 * 1024  # with a first input up to this size, a call is host-bound
_MOST_RESULTS = 4096


class NotRecordedError(RuntimeError):
    """Raised while a call is recorded, by something that cannot be; the message names it."""


def is_capturing() -> bool:
    """Whether the current stream of the current device is captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_host_bound(first: torch.Tensor) -> bool:
    """Whether the host takes longer than the device for a call with this first input."""
    return first.numel() * first.itemsize <= HOST_BOUND_BYTES  # strides may be symbols


def memoize(function: Callable[P, R]) -> Callable[P, R]:
    """Like `functools.lru_cache`, about which torch.compile warns.

    Arguments must be positional and hashable. While torch compiles, the cache is not used. Errors
    are not cached, and neither are results found while a CUDA graph is captured, when libraries
    cannot answer all questions.
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
