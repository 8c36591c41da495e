"""How kernels read a tensor as a matrix: all axes but the last count together as rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor of this shape."""
    return math.prod(shape[:-1]), shape[-1]


def rows_of(x: torch.Tensor) -> int:
    """Product of all sizes but the last, also where the last is 0."""
    cols = x.shape[-1]
    return x.numel() // cols if cols else math.prod(x.shape[:-1])
