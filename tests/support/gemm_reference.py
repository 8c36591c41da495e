"""GEMMs in float64, and bounds for the error of native GEMMs."""

from dataclasses import dataclass

import torch

from transformer_engine.pytorch.scale_layout import layout_of

E4M3, E5M2 = 5, 6
FP8_TYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
PLAIN_TYPES = [torch.float32, torch.float16, torch.bfloat16]

# Relative error of one rounding: half a unit in the last place.
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}


@dataclass
class Operand:
    """One operand of a GEMM: the data for the op, and the values as float64 `[m or n, k]`."""

    data: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor | None = None
    format: int = -1
    transposed: bool = False

    def to(self, device: str) -> "Operand":
        scales = None if self.scales is None else self.scales.to(device)
        return Operand(self.data.to(device), self.values, scales, self.format, self.transposed)


def plain(rows: int, k: int, dtype: torch.dtype, transposed: bool = False) -> Operand:
    data = torch.randn(k, rows) if transposed else torch.randn(rows, k)
    data = data.to(dtype)
    values = data.double()
    return Operand(data, values.t() if transposed else values, transposed=transposed)


def fp8(rows: int, k: int, format: int, scale: float = 4.0) -> Operand:
    codes = (torch.randn(rows, k) * scale).to(FP8_TYPES[format])
    scales = torch.tensor([1 / scale, scale])
    return Operand(codes.view(torch.uint8), codes.double() / scale, scales, format)


def operands(m: int, n: int, k: int, kind: object, layout: str = "TN") -> tuple[Operand, Operand]:
    """Makes both operands; `kind` is a dtype or a pair of FP8 formats, `layout` as in BLAS."""
    if isinstance(kind, torch.dtype):
        return plain(m, k, kind, layout[1] == "T"), plain(n, k, kind, layout[0] == "N")
    return fp8(m, k, kind[0]), fp8(n, k, kind[1])


def arguments(a: Operand, b: Operand) -> dict[str, object]:
    return {
        "a_scales": a.scales,
        "b_scales": b.scales,
        "a_format": a.format,
        "b_format": b.format,
        "a_transposed": a.transposed,
        "b_transposed": b.transposed,
    }


def product(a: Operand, b: Operand) -> torch.Tensor:
    return a.values @ b.values.t()


def rounding(value: torch.Tensor, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Bound for a rounding before D is added: cuBLASLt rounds a 16-bit product first."""
    return value.abs() * (torch.finfo(dtype).eps / 2 if device == "cuda" else 0)


def slack(a: Operand, b: Operand, device: str, fast: bool = False) -> torch.Tensor:
    """Bound for the rounding errors inside the sum of each element.

    The bound is a share of the sum of magnitudes. fp32 sums add fp32 errors, and TF32 drops 13 bits
    of each factor. The tensor cores keep about 14 bits of an FP8 sum, over 128 terms or (fast) over
    all terms. The bits count from the largest term, so small terms lose more if magnitudes differ
    from block to block.
    """
    if device == "cpu":
        share = 2**-20
    elif a.format >= 0 and layout_of(a.format).in_blocks:
        share = 2**-10
    elif a.format >= 0:
        share = 2**-10 if fast else 2**-12
    else:
        share = 2**-9 if a.data.dtype is torch.float32 else 2**-18
    return share * (a.values.abs() @ b.values.abs().t())


def assert_close(
    result: torch.Tensor, expected: torch.Tensor, slack: torch.Tensor | float = 0.0
) -> None:
    """Asserts equality within one rounding to the result's dtype, plus `slack`."""
    bound = 1.01 * ROUNDING[result.dtype] * expected.abs() + slack + 1e-6
    error = (result.detach().cpu().double() - expected.view(result.shape)).abs()
    excess = error - bound.view(result.shape)
    worst = int(excess.argmax()) if excess.numel() else 0
    assert not excess.numel() or excess.max() <= 0, (
        f"element {worst}: got {result.flatten()[worst].item()}, expected "
        f"{expected.flatten()[worst].item()} within {bound.flatten()[worst].item():.3g}"
    )
