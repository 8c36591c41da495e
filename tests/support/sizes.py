"""Calls as those with large inputs are."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformer_engine.pytorch import capture

_SCALARS = 64  # bytes: amaxes and scales are no large inputs


@contextmanager
def as_large_inputs(on: bool = True) -> Iterator[None]:
    """Layers run part by part, recorded without slabs, whatever the size of their inputs."""
    before = capture.HOST_BOUND_BYTES
    capture.HOST_BOUND_BYTES = _SCALARS if on else before
    try:
        yield
    finally:
        capture.HOST_BOUND_BYTES = before
