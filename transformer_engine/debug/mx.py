"""Casts to MXFP8, as by `MXFP8BlockScaling()`, in plain torch: there is no kernel for them.

Every 32 consecutive values of a row (a run) share a scale that is a power of two:

    inverse = 2^e,  e the smallest integer with 2^e >= amax * 2^margin / largest, within [-127, 127]
    code    = FP8(x / inverse), rounded to nearest even, saturating

The amax of a run ignores NaN; an Inf in the run makes the inverse 2^127. The inverse of a run of
zeros is returned as zero, because its codes are zero whatever the scale is.
"""

from __future__ import annotations

import torch

from transformer_engine.pytorch.dtypes import E4M3, TORCH_FP8
from transformer_engine.pytorch.kernels.shapes import matrix_shape

BLOCK = 32


def cast_to_mx(
    x: torch.Tensor, format: int = E4M3, margin: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (uint8) and the inverse scale of each element (fp32), both `[rows, cols]`.

    The last run of a row may be shorter.

    >>> codes, inverses = cast_to_mx(torch.tensor([[448.0, 1.0]]))
    >>> codes.view(torch.float8_e4m3fn).float().tolist(), inverses.tolist()
    ([[448.0, 1.0]], [[1.0, 1.0]])
    """
    rows, cols = x.shape
    largest = torch.finfo(TORCH_FP8[format]).max
    x = x.float()
    magnitudes = x.abs().nan_to_num(0.0, posinf=torch.inf)
    padded = torch.nn.functional.pad(magnitudes, (0, -cols % BLOCK))
    runs = padded.view(rows, padded.shape[1] // BLOCK, BLOCK)
    amax = runs.amax(dim=2).double()  # amax / largest may be subnormal in fp32
    mantissa, exponent = torch.frexp(amax * 2.0**margin / largest)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(-127, 127)  # 0.5: an exact power of two
    exponent = exponent.masked_fill(amax.isinf(), 127)
    inverse = torch.ldexp(torch.ones_like(amax), exponent).float()
    known = torch.stack([inverse, inverse.masked_fill(amax == 0, 0.0)])
    inverses, reported = known.repeat_interleave(BLOCK, dim=2)[:, :, :cols]
    values = (x / inverses).clamp(-largest, largest)
    return values.to(TORCH_FP8[format]).view(torch.uint8), reported


def seen_along(x: torch.Tensor, columnwise: bool) -> torch.Tensor:
    """View `x` as a matrix, transposed if `columnwise`."""
    flat = x.reshape(matrix_shape(x.shape))
    return flat.t() if columnwise else flat


def fake_quantize_to_mx(
    x: torch.Tensor, format: int, margin: int, columnwise: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Round `x` to values that MXFP8 can represent; return a plain tensor of `dtype`."""
    codes, inverses = cast_to_mx(seen_along(x.detach(), columnwise), format, margin)
    values = codes.view(TORCH_FP8[format]).float() * inverses
    return (values.t() if columnwise else values).reshape(x.shape).to(dtype).contiguous()
