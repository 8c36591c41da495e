"""Largest magnitude of a tensor, and the scales of current scaling that follow from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.library import library_op

_ANY_FORMAT = 5  # has no effect where no scale is computed


@library_op()
def amax(x: torch.Tensor, *, launch: bool = True) -> torch.Tensor:
    """`max |x|` as fp32 `[1]`, NaN ignored; 0 for an empty tensor.

    Args:
        x: fp32, fp16 or bf16, contiguous, any shape.
    """
    result = x.new_empty(1, dtype=torch.float32)
    if launch:
        _C.amax(x, result, None, _ANY_FORMAT, False, 0.0)
    return result


@library_op()
def current_scales(
    x: torch.Tensor, format: int, power_of_2: bool, epsilon: float, *, launch: bool = True
) -> torch.Tensor:
    """Scales fp32 `[2]` = {1/scale, scale} with scale = fp8_max / max(amax(x), epsilon).

    A tensor and its amax have the same scales, so `x` may be an amax that ranks have reduced.

    Args:
        x: fp32, fp16 or bf16, contiguous, any shape.
        format: value of `DType` (5 = E4M3, 6 = E5M2).
        power_of_2: round the scale down to a power of two.
        epsilon: lower bound of the amax. An amax of 0 or Inf gives scale 1.
    """
    scales = x.new_empty(2, dtype=torch.float32)
    if launch:
        _C.amax(x, None, scales, format, power_of_2, epsilon)
    return scales


@library_op()
def current_scales_many(
    tensors: Sequence[torch.Tensor],
    format: int,
    power_of_2: bool,
    epsilon: float,
    *,
    launch: bool = True,
) -> list[torch.Tensor]:
    """`current_scales` of each of several tensors of one dtype on one device, in few launches."""
    scales = [x.new_empty(2, dtype=torch.float32) for x in tensors]
    if launch:
        _C.current_scales_many(tensors, scales, format, power_of_2, epsilon)
    return scales
