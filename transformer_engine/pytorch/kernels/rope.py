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
    """Rotate the first elements of each head by the angles of its position, in fp32.

    Args:
        x: `[sequence, batch, heads, size]`; with `cu_seqlens` `[tokens, heads, size]`; fp32, fp16
            or bf16, any strides whose last is 1.
        freqs: angles, fp32 `[positions, rotary_dim]`.
        starts: int32 `[batch]`, the position of each sequence's first token; None for 0.
        cu_seqlens: int32 `[batch + 1]`, where each packed sequence ends.
        batch_first: `x` is `[batch, sequence, heads, size]`.
        interleaved: pairs are (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2).
        backward: `x` is a gradient; apply the transpose of the rotation.
        period: the heads are taken in groups of this many; see `rotated`.
        rotated: the number of heads that are rotated in each group, the first ones. The other
            heads of the group are copied.

    Returns:
        A contiguous tensor of the shape and dtype of `x`, rounded once from fp32.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if launch:
        how = (batch_first, interleaved, backward, period, rotated)
        _C.rope(x, freqs, starts, cu_seqlens, *how, out)
    return out
