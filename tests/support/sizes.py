"""Calls as those with large inputs are."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformer_engine.pytorch import capture


@contextmanager
def as_large_inputs(on: bool = True, largest: int = 64) -> Iterator[None]:
    """Layers run part by part, recorded without slabs, if their inputs have more than a few bytes.

    Args:
        on: False changes nothing.
        largest: the bytes of what is small: amaxes, or scales, too.
    """
    before = capture.HOST_BOUND_BYTES
    capture.HOST_BOUND_BYTES = largest if on else before
    try:
        yield
    finally:
        capture.HOST_BOUND_BYTES = before
