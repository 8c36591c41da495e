"""Casts as `MXFP8BlockScaling()` makes them, in plain torch: what-if statistics have no other use.

Runs of 32 values along a row share a scale that is a power of two:

    inverse = 2^e,  e the least integer with 2^e >= amax / 448, within [-127, 127]
    code    = E4M3(x / inverse), nearest even, saturating

NaN is not counted in an amax; Inf makes the inverse 2^127. Runs of zeros say nothing: their codes
are zero whatever the scale is, and their inverse is given as zero.
"""

from __future__ import annotations

import torch

BLOCK = 32
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def cast_to_mx(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a matrix, uint8, and the inverse scale of each element, fp32; both `[rows, cols]`.

    The last run of a row may be shorter.

    >>> codes, inverses = cast_to_mx(torch.tensor([[448.0, 1.0]]))
    >>> codes.view(torch.float8_e4m3fn).float().tolist(), inverses.tolist()
    ([[448.0, 1.0]], [[1.0, 1.0]])
    """
    rows, cols = x.shape
    x = x.float()
    magnitudes = x.abs().nan_to_num(0.0, posinf=torch.inf)
    padded = torch.nn.functional.pad(magnitudes, (0, -cols % BLOCK))
    runs = padded.view(rows, padded.shape[1] // BLOCK, BLOCK)
    amax = runs.amax(dim=2).double()  # of which a share is not zero either
    mantissa, exponent = torch.frexp(amax / LARGEST)  # of a power of two the mantissa is 0.5
    exponent = (exponent - (mantissa == 0.5).int()).clamp(-127, 127)
    exponent = exponent.masked_fill(amax.isinf(), 127)
    inverse = torch.ldexp(torch.ones_like(amax), exponent).float()
    known = torch.stack([inverse, inverse.masked_fill(amax == 0, 0.0)])
    inverses, said = known.repeat_interleave(BLOCK, dim=2)[:, :, :cols]
    values = (x / inverses).clamp(-LARGEST, LARGEST)
    return values.to(torch.float8_e4m3fn).view(torch.uint8), said
