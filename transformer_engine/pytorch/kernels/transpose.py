"""Transpose of one-byte codes."""

from __future__ import annotations

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.library import library_op
from transformer_engine.pytorch.kernels.shapes import rows_of


@library_op("transpose(Tensor codes) -> Tensor")
def transpose(codes: torch.Tensor, *, launch: bool = True) -> torch.Tensor:
    """Codes `[..., cols]`, read as `[rows, cols]`, written as `[cols, rows]`."""
    out = codes.new_empty((codes.shape[-1], rows_of(codes)))
    if launch:
        _C.transpose(codes, out)
    return out
