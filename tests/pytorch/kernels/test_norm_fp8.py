"""FP8 results of norms: codes, transposed codes, amax, scales of delayed and current scaling."""

import math

import fp8_reference as fp8
import pytest
import torch
from cases.norm import (
    BF16,
    F16,
    F32,
    KINDS,
    Case,
    same,
)
from rulers import assert_bitwise, assert_codes_close

# Whole tiles, parts of tiles along both axes, rows of one block and of several blocks.
FP8_SHAPES = [
    (64, 512),
    (128, 4096),
    (48, 768),
    (80, 1032),
    (16, 8192),
    (32, 12288),
    (16, 20480),
    (7, 64),
    (33, 65),
    (2, 24, 264),
]


@KINDS
@pytest.mark.parametrize("shape", FP8_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_fp8_is_rounded_once_from_fp32(device, kind, shape, dtype):
    case = Case(kind, shape, (dtype, dtype, dtype), device)
    value = case.to("cpu").forward(F32)[0]
    scale = torch.tensor([37.5])
    for format in fp8.FORMATS:
        expected = fp8.encode(value, format, 37.5)
        for plain, row, column in [(0, 1, 1), (0, 1, 0), (0, 0, 1), (1, 1, 1)]:
            amax = torch.zeros(1, device=device)
            y, rowwise, columnwise, scales, *_ = case.forward(
                dtype if plain else None,
                format=format,
                scale=scale.to(device),
                amax=amax,
                rowwise=bool(row),
                columnwise=bool(column),
            )
            assert_bitwise(scales, torch.stack([1 / scale[0], scale[0]]))
            torch.testing.assert_close(amax.cpu(), value.abs().max()[None], rtol=4e-6, atol=0)
            ruler = assert_bitwise if device == "cpu" else assert_codes_close
            if row:
                ruler(rowwise, expected)
            if column:
                ruler(columnwise, expected.view(-1, shape[-1]).T.contiguous())
            if row and column:
                assert_bitwise(columnwise, rowwise.view(-1, shape[-1]).T.contiguous())
            if plain:
                same(y, case.forward(dtype)[0])


@KINDS
@pytest.mark.parametrize("shape", [(64, 1024), (33, 65)], ids=str)
def test_amax_is_that_of_the_fp32_result(device, kind, shape):
    case = Case(kind, shape, (BF16, BF16, BF16), device)
    scale = torch.ones(1, device=device)
    for dtype in (F32, BF16):  # the rounded amax is the amax of rounded values
        for before in (0.0, 1e5):
            amax = torch.full((1,), before, device=device)
            y, *_ = case.forward(dtype, scale=scale, amax=amax, rowwise=True, columnwise=True)
            assert amax.to(dtype).item() == max(torch.tensor(before, dtype=dtype), fp8.amax(y))


@KINDS
@pytest.mark.parametrize("shape", [(64, 1024), (33, 65), (700, 16), (3, 40000)], ids=str)
@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (BF16, BF16, BF16), (F32, F32, F16)], ids=str)
def test_current_scaling_sees_the_rounded_result(device, kind, shape, dtypes):
    case = Case(kind, shape, dtypes, device)
    for format in fp8.FORMATS:
        for options in ({}, {"power_of_2": True}, {"amax_epsilon": 1e3}):
            amax = torch.full((1,), 7e8, device=device)
            y, *codes, scales, _, _ = case.forward(
                case.y_dtype, format=format, amax=amax, current=True, **options
            )
            assert codes == [None, None]
            same(y, case.forward(case.y_dtype)[0])
            assert amax.item() == fp8.amax(y)
            bounded = torch.tensor(max(fp8.amax(y), options.get("amax_epsilon", 0.0)))
            scale = torch.tensor(fp8.LARGEST[format]) / bounded
            if options.get("power_of_2"):
                scale = torch.exp2(torch.floor(torch.log2(scale)))
            assert_bitwise(scales, torch.stack([1 / scale, scale]))


@KINDS
@pytest.mark.parametrize("cols", [64, 96, 65], ids=str)
def test_nan_stays_in_its_row(device, kind, cols):
    case = Case(kind, (16, cols), (BF16, BF16, BF16), device)
    case.x[3, 5] = math.nan
    amax, scale = torch.zeros(1, device=device), torch.ones(1, device=device)
    y, rowwise, columnwise, *_ = case.forward(
        BF16, scale=scale, amax=amax, rowwise=True, columnwise=True
    )
    others = torch.arange(16) != 3
    assert bool(y[3].isnan().all()) and not bool(y.cpu()[others].isnan().any())
    assert bool((rowwise[3] == fp8.NAN_CODE).all()) and bool((columnwise[:, 3] == 0x7F).all())
    assert amax.bfloat16().item() == fp8.amax(y.cpu()[others])
    y, _, _, scales, mean, rstd = case.forward(BF16, format=fp8.E4M3, current=True)
    assert_bitwise(scales[1], torch.tensor(448.0) / fp8.amax(y.cpu()[others]))
    dx, *_ = case.backward(mean, rstd)
    assert bool(dx[3].isnan().all()) and not bool(dx.cpu()[others].isnan().any())
