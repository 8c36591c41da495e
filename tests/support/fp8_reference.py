"""Reference for FP8 casts, written with torch dtypes, and inputs that reach every branch."""

import math

import torch

E4M3, E5M2 = 5, 6  # values of DType
FORMATS = [E4M3, E5M2]
HIGH_PRECISION = [torch.float32, torch.float16, torch.bfloat16]
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
TORCH_DTYPE = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
NAN_CODE = 0x7F


def encode(x: torch.Tensor, format: int, scale: float | torch.Tensor) -> torch.Tensor:
    """Returns the codes of `x * scale`: rounded to nearest even, saturated, every NaN as 0x7f."""
    value = x.float() * scale
    codes = value.clamp(-LARGEST[format], LARGEST[format]).to(TORCH_DTYPE[format])
    return codes.view(torch.uint8).masked_fill(value.isnan(), NAN_CODE)


def decode(codes: torch.Tensor, format: int) -> torch.Tensor:
    """Returns the values of codes in fp32."""
    return codes.view(TORCH_DTYPE[format]).float()


def amax(x: torch.Tensor) -> float:
    """Returns the largest magnitude; NaN is ignored."""
    return float(x.float().abs().nan_to_num(nan=0.0, posinf=math.inf).max()) if x.numel() else 0.0


def awkward(shape: tuple[int, ...], dtype: torch.dtype, *, finite: bool = False) -> torch.Tensor:
    """Values of all magnitudes of FP8, with zeros, subnormals, NaN and infinities among them."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-20, 12, shape).float())
    x = x.to(dtype)
    special = [0.0, -0.0, 448.0, -464.0, 57344.0, -61440.0, 2.0**-10, -(2.0**-17), 1.5 * 2.0**-9]
    special += [torch.finfo(dtype).max, -torch.finfo(dtype).max, torch.finfo(dtype).tiny / 4]
    if not finite:
        special += [math.nan, math.inf, -math.inf, -math.nan]
    flat = x.view(-1)
    places = torch.randperm(flat.numel())[: flat.numel() // 3]
    values = torch.tensor(special, dtype=dtype)
    flat[places] = values[torch.randint(len(values), places.shape)]
    return x
