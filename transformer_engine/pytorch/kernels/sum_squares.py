"""Sums of squares of many tensors in few launches, from which norms are computed."""

from __future__ import annotations

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.library import library_op

_BLOCK = 1 << 14  # elements in a partial sum, as in `csrc/ops/sum_squares.h`


@library_op()
def sum_squares(tensors: list[torch.Tensor], *, launch: bool = True) -> torch.Tensor:
    """Partial sums of squares: one for each 16,384 elements of a tensor, or fewer at its end.

    Args:
        tensors: at least one, on one device, contiguous, fp32, fp16 or bf16.

    Returns:
        fp32 `[parts]`, whose sum is the square of the norm over all tensors. Equal tensors give
        equal bits.
    """
    parts = sum([-(-x.numel() // _BLOCK) for x in tensors])
    sums = torch.empty(parts, dtype=torch.float32, device=tensors[0].device)
    if launch:
        _C.sum_squares(tensors, sums)
    return sums
