"""Makes small test inputs run the code path of large inputs."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformer_engine.pytorch import capture


@contextmanager
def as_large_inputs(on: bool = True, largest: int = 64) -> Iterator[None]:
    """Treats inputs of more than `largest` bytes as large.

    Layers with large inputs are not fused: they run part by part, and recordings use no slabs.

    Args:
        on: False changes nothing.
        largest: size in bytes up to which tensors still count as small, such as amaxes and scales.
    """
    before = capture.HOST_BOUND_BYTES
    capture.HOST_BOUND_BYTES = largest if on else before
    try:
        yield
    finally:
        capture.HOST_BOUND_BYTES = before
