"""MXFP8 casts in what-if statistics and FakeQuant, against a definition in Python.

The definition handles each run of 32 values in a row on its own.
"""

import math
from pathlib import Path

import fp8_reference as fp8
import pytest
import torch
from debug_session import debugging, inspect, logged, section
from rulers import assert_bitwise

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.debug.features.fake_quant import FakeQuant
from transformer_engine.debug.mx import cast_to_mx

STATS = ["underflows%", "overflows%", "scale_inv_min", "scale_inv_max", "mse"]


def exponent_of(share: float) -> int:
    """The smallest e with 2^e >= amax / largest, limited to the range of E8M0."""
    if math.isinf(share):
        return 127
    e = -127
    while e < 127 and math.ldexp(1.0, e) < share:
        e += 1
    return e


def by_definition(
    x: torch.Tensor, format: int = fp8.E4M3, margin: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes, and inverse scales per element (zero in runs of only zeros and NaN)."""
    codes, inverses = [], []
    for row in x:
        for run in row.split(32):
            amax = fp8.amax(run)
            inverse = math.ldexp(1.0, exponent_of(amax * 2.0**margin / fp8.LARGEST[format]))
            codes.append(fp8.encode(run, format, 1 / inverse))
            inverses.append(torch.full(run.shape, inverse if amax else 0.0))
    return torch.cat(codes).view(x.shape), torch.cat(inverses).view(x.shape)


def edges() -> torch.Tensor:
    """Runs whose amax is 448 times a power of two, a neighbour of it, or at an end of fp32."""
    largest = [448.0 * 2.0**e for e in (-100, -1, 0, 1, 100)]
    at = torch.tensor([*largest, 2.0**-149, 2.0**-126, torch.finfo(torch.float32).max])
    amax = torch.cat([at, at.nextafter(at * 2).clamp(max=3.4e38), at.nextafter(at / 2)])
    return amax[:, None] * torch.linspace(-1, 0.9, 32)


@pytest.mark.parametrize(
    "x",
    [
        edges(),
        torch.zeros(2, 32),
        torch.tensor([[1.0] * 31 + [math.inf], [2.0] * 31 + [math.nan], [math.nan] * 32]),
        torch.empty(0, 64),
        torch.empty(3, 0),
    ],
    ids=["edges", "zeros", "special", "no rows", "no columns"],
)
def test_casts_of_edges(x: torch.Tensor, device: str) -> None:
    codes, inverses = cast_to_mx(x.to(device))
    expected = by_definition(x) if x.numel() else (x.to(torch.uint8), x)
    nan = x.isnan()
    assert_bitwise(codes.cpu().masked_fill(nan, fp8.NAN_CODE), expected[0])
    assert_bitwise(inverses, expected[1])


@pytest.mark.parametrize("dtype", fp8.HIGH_PRECISION, ids=str)
@pytest.mark.parametrize("shape", [(4, 96), (33, 7), (1, 1)], ids=str)
def test_casts(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    x = fp8.awkward(shape, dtype, finite=True)
    for got, expected in zip(cast_to_mx(x.to(device)), by_definition(x), strict=True):
        assert_bitwise(got, expected)


def statistics_of(x: torch.Tensor) -> dict[str, float]:
    codes, inverses = by_definition(x)
    cast = fp8.decode(codes, fp8.E4M3).double() * inverses
    said = inverses[inverses != 0]
    return {
        "underflows%": 100 * ((x != 0) & (cast == 0)).double().mean().item(),
        "overflows%": 0.0,  # no value exceeds the scale
        "scale_inv_min": said.min().item(),
        "scale_inv_max": said.max().item(),
        "mse": (x.double() - cast).square().mean().item(),
    }


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_statistics_of_both_directions(precision: str, tmp_path: Path, device: str) -> None:
    x = torch.randn(3, 20, 80) * torch.exp2(torch.randint(-24, 6, (3, 20, 80)))
    x[0, 0] = 0
    matrix = x.view(60, 80)
    expected = {
        f"mxfp8_{name}{direction}": value
        for direction, seen in (("", matrix), ("_columnwise", matrix.t()))
        for name, value in statistics_of(seen).items()
    }
    config = section("LogFp8TensorStats", tensors=["activation"], stats=list(expected))
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)
    more = {"quantizer": quantizer} if precision == "fp8" else {}
    with debugging(tmp_path, config):
        inspect("fc1", "activation", x.to(device), **more)
        debug_api.step()
    assert logged(tmp_path)[0, "fc1", "activation"] == pytest.approx(expected, rel=1e-6)
    assert expected["mxfp8_underflows%"] > 0.1
    assert expected["mxfp8_scale_inv_min"] < expected["mxfp8_scale_inv_max"]


@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("format", [fp8.E4M3, fp8.E5M2])
@pytest.mark.parametrize(
    ("tensor", "gemm", "columnwise"),
    [
        ("activation", "fprop", False),
        ("activation", "wgrad", True),
        ("weight", "dgrad", True),
        ("output", "fprop", False),
    ],
)
def test_fake_quant_rounds_along_the_sums_of_a_gemm(
    tensor: str, gemm: str, columnwise: bool, format: int, margin: int, device: str
) -> None:
    x = fp8.awkward((3, 20, 40), torch.bfloat16, finite=True)
    matrix = x.view(60, 40)
    matrix = matrix.t() if columnwise else matrix
    codes, inverses = by_definition(matrix, format, margin)
    values = fp8.decode(codes, format) * inverses
    expected = (values.t() if columnwise else values).reshape(x.shape).bfloat16()
    name = {fp8.E4M3: "MXFP8E4M3", fp8.E5M2: "MXFP8E5M2"}[format]
    config = {"quant_format": name, "margin": margin}
    made = FakeQuant().modify_tensor(config, "l", gemm, tensor, x.to(device))
    assert_bitwise(made, expected)
    out = torch.empty_like(made)
    assert FakeQuant().modify_tensor(config, "l", gemm, tensor, x.to(device), out=out) is None
    assert_bitwise(out, expected)
