"""Rotary position embedding of queries or keys, forward and backward."""

from __future__ import annotations

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.library import library_op


@library_op()
def rope(
    x: torch.Tensor,
    freqs: torch.Tensor,
    starts: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    batch_first: bool,
    interleaved: bool,
    backward: bool,
    period: int = 1,
    rotated: int = 1,
    *,
    launch: bool = True,
) -> torch.Tensor:
    """Turn the first elements of each head by its position's angles; rounded once from fp32.

    Args:
        x: `[sequence, batch, heads, size]`; with `cu_seqlens` `[tokens, heads, size]`; fp32, fp16
            or bf16, any strides whose last is 1.
        freqs: angles, fp32 `[positions, turned]`.
        starts: int32 `[batch]`, the position of each sequence's first token; None for 0.
        cu_seqlens: int32 `[batch + 1]`, where each packed sequence ends.
        batch_first: `x` is `[batch, sequence, heads, size]`.
        interleaved: pairs are (2 i, 2 i + 1) instead of (i, i + turned / 2).
        backward: turn a gradient back.
        period: heads that repeat: of each so many in a row the first `rotated` are turned.
        rotated: see `period`; the other heads are copied.

    Returns:
        A contiguous tensor of the shape and dtype of `x`.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if launch:
        how = (batch_first, interleaved, backward, period, rotated)
        _C.rope(x, freqs, starts, cu_seqlens, *how, out)
    return out
