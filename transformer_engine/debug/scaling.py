"""Casts to FP8 whose scale is computed from an amax and a margin."""

from __future__ import annotations

import torch

from transformer_engine.pytorch.kernels.amax import current_scales
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.kernels.quantize import quantize
from transformer_engine.pytorch.tensor import Float8Tensor


def scales_with_margin(largest: torch.Tensor, format: int, margin: int) -> torch.Tensor:
    """Return fp32 `[2]` = {1/scale, scale} with scale = fp8_max / (amax * 2^margin).

    If the amax is 0 or Inf, the scale is 1. An amax does not count NaN.
    """
    return current_scales(largest * 2.0**margin, format, False, 0.0)


def cast(
    x: torch.Tensor, largest: torch.Tensor, format: int, margin: int, columnwise: bool
) -> Float8Tensor:
    """Cast `x` to FP8.

    Args:
        x: fp32, fp16 or bf16, any shape, contiguous.
        largest: amax of `x`, or of the tensor that `x` is a shard of, fp32 `[1]`.
        format: value of `DType`.
        margin: see `scales_with_margin`.
        columnwise: whether to make the transposed codes, too.
    """
    scales = scales_with_margin(largest, format, margin)
    codes, transposed, _, _ = quantize(x, format, None, None, scales, True, columnwise, None)
    assert codes is not None
    return Float8Tensor(x.shape, x.dtype, codes, scales, format, data_transpose=transposed)


def fake_quantize(
    x: torch.Tensor, largest: torch.Tensor, format: int, margin: int, dtype: torch.dtype
) -> torch.Tensor:
    """Round `x` to FP8 values; return a plain tensor of `dtype`. Arguments are those of `cast`."""
    scales = scales_with_margin(largest, format, margin)
    codes, _, _, _ = quantize(x, format, None, None, scales, True, False, None)
    assert codes is not None
    return dequantize(codes, format, scales, dtype)
