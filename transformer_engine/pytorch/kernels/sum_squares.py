"""Sums of squares of many tensors in few launches, of which norms are made."""

from __future__ import annotations

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.library import library_op

_BLOCK = 1 << 14  # elements of a sum, as in `csrc/ops/sum_squares.h`


@library_op()
def sum_squares(tensors: list[torch.Tensor], *, launch: bool = True) -> torch.Tensor:
    """Squares of the elements of all tensors, summed up in parts of one tensor each.

    Args:
        tensors: one at least, on one device, contiguous, fp32, fp16 or bf16.

    Returns:
        fp32 `[parts]`: the sum of a norm's square. Equal tensors give equal bits.
    """
    parts = sum([-(-x.numel() // _BLOCK) for x in tensors])
    sums = torch.empty(parts, dtype=torch.float32, device=tensors[0].device)
    if launch:
        _C.sum_squares(tensors, sums)
    return sums
