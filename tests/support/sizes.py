"""Calls as those with large inputs are."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformer_engine.pytorch import capture


@contextmanager
def as_large_inputs(on: bool = True) -> Iterator[None]:
    """Layers run part by part, recorded without slabs, whatever the size of their inputs.

    Nothing is recorded where ranks share a layer.
    """
    before = capture.HOST_BOUND_BYTES
    capture.HOST_BOUND_BYTES = -1 if on else before
    try:
        yield
    finally:
        capture.HOST_BOUND_BYTES = before
