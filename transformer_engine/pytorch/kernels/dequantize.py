"""FP8 codes back to floating point."""

from __future__ import annotations

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.library import library_op


@library_op()
def dequantize(
    codes: torch.Tensor,
    format: int,
    scales: torch.Tensor,
    dtype: torch.dtype,
    *,
    launch: bool = True,
) -> torch.Tensor:
    """`decode(codes)` times the inverse scale, computed in fp32 and rounded once.

    Args:
        codes: one-byte elements, contiguous, any shape.
        format: value of `DType` (5 = E4M3, 6 = E5M2), or what `ScaleLayout.code` makes of it.
        scales: fp32 `[2]` = {1/scale, scale}, or only the first element; or the inverse scales of
            blocks, as `quantize_blocks` returns them.
        dtype: fp32, fp16 or bf16.

    Returns:
        A tensor of the shape of `codes`.
    """
    x = torch.empty_like(codes, dtype=dtype)
    if launch:
        _C.dequantize(codes, format, scales, x)
    return x
