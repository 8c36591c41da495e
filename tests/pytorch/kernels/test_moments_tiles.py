"""Moments that kernels compute of tiles in registers: edges, special values, groups of tiles."""

import pytest
import torch
from cases.moments import VALUES, assert_row
from rulers import assert_bitwise

from transformer_engine.pytorch.kernels.activation import activation_backward, activation_forward
from transformer_engine.pytorch.kernels.activation import activation_kind as kind_of
from transformer_engine.pytorch.kernels.moments import empty_moments, moments
from transformer_engine.pytorch.kernels.norm import LAYER_NORM, RMS_NORM, norm_forward
from transformer_engine.pytorch.kernels.quantize import quantize

E4M3 = 5
BF16, FP16 = torch.bfloat16, torch.float16
# Whole tiles, parts of tiles along both axes, one row of tiles, rows that are not aligned to 16
# bytes.
SHAPES = [(384, 256), (300, 136), (8, 1024), (130, 131)]


def cast(x, row, dbias=None, active=None):
    scale = torch.ones(1, device=x.device)
    return quantize(x, E4M3, scale, None, None, True, True, dbias, row, active)


def fp8(x):
    return {"scale": torch.ones(1, device=x.device), "rowwise": True, "columnwise": True}


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("values", VALUES)
def test_values(device, values, dtype):
    for shape in SHAPES[:2]:
        x = VALUES[values](shape).to(dtype).to(device)
        row = empty_moments(device)
        cast(x, row)
        assert_row(row, x)


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32], ids=str)
@pytest.mark.parametrize("dbias", [None, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device, shape, dbias, dtype):
    x = (1 + torch.randn(shape)).to(device, dtype)
    row = empty_moments(device)
    with_moments = cast(x, row, dbias)
    assert_row(row, x)
    for got, expected in zip(with_moments, cast(x, None, dbias), strict=True):
        if expected is not None:
            assert_bitwise(got, expected)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", ["gelu", "geglu", "relu", "swiglu"])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_activations(device, shape, name, dtype):
    kind = kind_of(name)
    x = (0.5 + torch.randn(shape[0], shape[1] * (1 + kind % 2))).to(device, dtype)
    dy = torch.randn(shape).to(device, dtype)
    row, row_of_dx = empty_moments(device), empty_moments(device)
    activation_forward(x, kind, False, **fp8(x), moments=row)
    activation_backward(dy, x, kind, False, **fp8(x), dbias=dtype, moments=row_of_dx)
    assert_row(row, activation_forward(x, kind)[0])
    assert_row(row_of_dx, activation_backward(dy, x, kind)[0])


def norm(x, kind, offset=0.0, dtype=None, row=None):
    """LayerNorm, or RMSNorm without the offset, with row-wise and column-wise FP8 results."""
    gamma = torch.linspace(0.5, 2, x.shape[-1], device=x.device, dtype=x.dtype)
    beta = torch.full_like(gamma, offset) if kind == LAYER_NORM else None
    return norm_forward(x, gamma, beta, kind, 1e-5, False, dtype, **fp8(x), moments=row)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("kind", [LAYER_NORM, RMS_NORM])
@pytest.mark.parametrize("shape", [(384, 256), (300, 512), (37, 1024), (65, 264)], ids=str)
def test_norms(device, shape, kind, dtype):
    x = (1 + torch.randn(shape)).to(device, dtype)
    row = empty_moments(device)
    with_moments, plain = norm(x, kind, row=row), norm(x, kind, dtype=dtype)
    assert_row(row, plain[0])
    for got, expected in zip(with_moments[1:], plain[1:], strict=True):
        if expected is not None:
            assert_bitwise(got, expected)


@pytest.mark.parametrize("offset", [100.0, 1e-25, float("nan"), float("inf")])
def test_norms_that_need_all_digits(device, offset):
    x = torch.randn(100, 512).to(device, BF16)
    row = empty_moments(device)
    norm(x, LAYER_NORM, offset, row=row)
    assert_row(row, norm(x, LAYER_NORM, offset, BF16)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16384, 4096), (1000, 12288), (3000, 768)], ids=str)
def test_norms_of_many_tiles(shape):
    x = torch.randn(shape, device="cuda", dtype=BF16)
    first = empty_moments("cuda")
    norm(x, LAYER_NORM, 0.5, row=first)
    assert_row(first, norm(x, LAYER_NORM, 0.5, BF16)[0])
    for _ in range(20):
        row = empty_moments("cuda")
        norm(x, LAYER_NORM, 0.5, row=row)
        assert_bitwise(row, first)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 2304), (33, 3328), (0, 8192)], ids=str)
def test_norms_of_more_blocks_than_tiles(shape):
    x = torch.randn(shape, device="cuda", dtype=BF16)
    row = empty_moments("cuda")
    torch.cuda.synchronize()
    # A new stream has a new workspace, which is no larger than needed here.
    with torch.cuda.stream(torch.cuda.Stream()):
        norm(x, LAYER_NORM, 0.5, row=row)
        expected = norm(x, LAYER_NORM, 0.5, BF16)[0]
    torch.cuda.synchronize()
    if expected.numel():
        assert_row(row, expected)
    else:
        assert_bitwise(row, empty_moments())


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_plain_result_beside(device, name):
    x = torch.randn(256, 256).to(device, BF16)
    row = empty_moments(device)
    y = activation_forward(x, kind_of(name), True, **fp8(x), moments=row)[0]
    assert_row(row, y)


def test_memory_that_is_not_aligned(device):
    x = torch.randn(256 * 128 + 1).to(device, BF16)[1:].view(256, 128)
    row, row_of_y = empty_moments(device), empty_moments(device)
    cast(x, row)
    activation_forward(x, kind_of("gelu"), False, **fp8(x), moments=row_of_y)
    assert_row(row, x)
    assert_row(row_of_y, activation_forward(x, kind_of("gelu"))[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", [(2048, 2048), (5000, 4104), (16384, 8192)], ids=str)
def test_groups_of_tiles_merge_in_one_order(shape, dtype):
    """One group, many groups, and groups of more tiles than a warp reads at once."""
    x = torch.randn(shape, device="cuda").to(dtype)
    first = empty_moments("cuda")
    cast(x, first)
    assert_row(first, x)
    apart = empty_moments("cuda")
    moments(x, apart)
    torch.testing.assert_close(first, apart, rtol=1e-6, atol=1e-6 * x.numel() ** 0.5)
    for _ in range(20):
        row = empty_moments("cuda")
        cast(x, row)
        assert_bitwise(row, first)


def test_micro_batches_merge_with_passes_of_their_own(device):
    parts = [(2 + torch.randn(256, 128)).to(device, BF16) for _ in range(3)]
    row = empty_moments(device)
    for part in parts:
        cast(part, row)
    moments(parts[0], row)
    assert_row(row, torch.cat([*parts, parts[0]]))
