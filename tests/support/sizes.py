"""Calls as those with large inputs are."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformer_engine.pytorch import capture


@contextmanager
def as_large_inputs(on: bool = True) -> Iterator[None]:
    """Nothing is recorded, and layers run part by part, whatever the size of their inputs."""
    before = capture.HOST_BOUND_BYTES
    capture.HOST_BOUND_BYTES = -1 if on else before
    try:
        yield
    finally:
        capture.HOST_BOUND_BYTES = before
