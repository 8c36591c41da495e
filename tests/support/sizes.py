"""Calls as those with large inputs are."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformer_engine.pytorch.chain import segments


@contextmanager
def as_large_inputs(on: bool = True) -> Iterator[None]:
    """Nothing is recorded, and layers run part by part, whatever the size of their inputs."""
    before = segments.HOST_BOUND_BYTES
    segments.HOST_BOUND_BYTES = -1 if on else before
    try:
        yield
    finally:
        segments.HOST_BOUND_BYTES = before
