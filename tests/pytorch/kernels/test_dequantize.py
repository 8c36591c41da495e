"""dequantize on both backends: every code and every dtype."""

import fp8_reference as fp8
import pytest
import torch
from rulers import assert_bitwise

from transformer_engine import _C
from transformer_engine.pytorch.kernels.dequantize import dequantize

ALL_CODES = torch.arange(256).to(torch.uint8)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", fp8.HIGH_PRECISION, ids=str)
@pytest.mark.parametrize("format", fp8.FORMATS)
@pytest.mark.parametrize("scale_inverse", [1.0, 1 / 3, 2.0**-20, 1e30])
def test_every_code(device, dtype, format, scale_inverse):
    scales = torch.tensor([scale_inverse, 7.0])
    x = dequantize(ALL_CODES.to(device), format, scales.to(device), dtype)
    assert_bitwise(x, (fp8.decode(ALL_CODES, format) * scales[0]).to(dtype))


@pytest.mark.parametrize("shape", [(0,), (1,), (0, 5), (31,), (33, 65), (3, 5, 7), (512, 1000)])
@pytest.mark.parametrize("offset", [0, 1])
def test_shapes_and_alignment(device, shape, offset):
    count = int(torch.tensor(shape).prod())
    codes = torch.randint(256, (count + offset,), dtype=torch.uint8)
    scales = torch.tensor([0.3])
    x = dequantize(
        codes.to(device)[offset:].view(shape), fp8.E4M3, scales.to(device), torch.bfloat16
    )
    assert_bitwise(x, (fp8.decode(codes[offset:].view(shape), fp8.E4M3) * 0.3).bfloat16())


def test_float8_tensors_are_accepted(device):
    codes = ALL_CODES.to(device).view(torch.float8_e5m2)
    x = dequantize(codes, fp8.E5M2, torch.ones(2, device=device), torch.float32)
    assert_bitwise(x, fp8.decode(ALL_CODES, fp8.E5M2))


def test_as_library_operator(device):
    args = (ALL_CODES.to(device), fp8.E4M3, torch.ones(2, device=device), torch.float16)
    assert_bitwise(torch.ops.te.dequantize(*args), dequantize(*args))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    codes = torch.zeros(2**31 + 40, dtype=torch.uint8, device="cuda")
    codes[-256:] = ALL_CODES.cuda()
    x = dequantize(codes, fp8.E4M3, torch.ones(2, device="cuda"), torch.bfloat16)
    assert_bitwise(x[-256:], fp8.decode(ALL_CODES, fp8.E4M3).bfloat16())
    assert int(x[:-256].count_nonzero()) == 0


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (TypeError, "an FP8 format, got uint8", {"format": 0}),
        (TypeError, "one-byte codes, got float32", {"codes": torch.ones(4, 8)}),
        (ValueError, "the codes to be contiguous", {"codes": ALL_CODES[:32].view(8, 4).T}),
        (ValueError, r"shape \(4, 8\) for the output, got \(8\)", {"x": torch.ones(8)}),
        (TypeError, "float32, float16 or bfloat16 for the output", {"x": torch.ones(4, 8).int()}),
        (TypeError, "float32 for scales", {"scales": torch.ones(2).double()}),
        (ValueError, "1 or 2 scales, got none", {"scales": torch.ones(0)}),
    ],
)
def test_errors(error, message, changed):
    args = {
        "codes": ALL_CODES[:32].view(4, 8),
        "format": fp8.E4M3,
        "scales": torch.ones(2),
        "x": torch.empty(4, 8),
    }
    with pytest.raises(error, match=r"\[dequantize\] expected " + message):
        _C.dequantize(**(args | changed))
