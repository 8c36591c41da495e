"""How kernels read a tensor: the last axis is a row, all others are counted together."""

from __future__ import annotations

import math

import torch


def rows_of(x: torch.Tensor) -> int:
    """Product of all sizes but the last, also where the last is 0."""
    cols = x.shape[-1]
    return x.numel() // cols if cols else math.prod(x.shape[:-1])
