"""Transpose of one-byte codes, and of the scales of their blocks."""

from __future__ import annotations

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.library import library_op
from transformer_engine.pytorch.kernels.shapes import rows_of
from transformer_engine.pytorch.scale_layout import SQUARES


@library_op()
def transpose(codes: torch.Tensor, *, launch: bool = True) -> torch.Tensor:
    """Codes `[..., cols]`, read as `[rows, cols]`, written as `[cols, rows]`."""
    out = codes.new_empty((codes.shape[-1], rows_of(codes)))
    if launch:
        _C.transpose(codes, out)
    return out


@library_op()
def transpose_blocks(
    codes: torch.Tensor, scales: torch.Tensor, *, launch: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`transpose` of codes with 128 x 128 blocks, and of the inverse scales of these blocks.

    Args:
        codes: `[..., cols]`.
        scales: fp32, see `ScaleLayout.scale_shape`.
    """
    rows, cols = rows_of(codes), codes.shape[-1]
    out = codes.new_empty((cols, rows))
    out_scales = scales.new_empty(SQUARES.scale_shape(cols, rows))
    if launch:
        _C.transpose(codes, out, scales, out_scales)
    return out, out_scales
