"""The amax, and the scales of current scaling."""

import math

import fp8_reference as fp8
import pytest
import torch
from rulers import assert_bitwise

from transformer_engine import _C
from transformer_engine.pytorch.kernels.amax import (
    amax,
    current_scales,
    current_scales_many,
)

SHAPES = [(1,), (7,), (0,), (0, 3), (64, 64), (33, 65), (3, 5, 7), (1000, 1003)]
FLOAT_MAX = torch.finfo(torch.float32).max


def expected_scales(value, format, power_of_2=False, epsilon=0.0):
    value = max(value, epsilon)
    scale = torch.tensor(1.0)
    if math.isfinite(value) and value != 0:
        scale = torch.tensor(fp8.LARGEST[format]) / torch.tensor(value, dtype=torch.float32)
        scale = scale.clamp(max=FLOAT_MAX)
        if power_of_2:
            scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.stack([1 / scale, scale])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", fp8.HIGH_PRECISION, ids=str)
def test_amax(device, shape, dtype):
    for finite in (True, False):
        x = fp8.awkward(shape, dtype, finite=finite)
        got = amax(x.to(device))
        assert got.shape == (1,)
        assert got.dtype == torch.float32
        assert got.item() == fp8.amax(x)


@pytest.mark.parametrize("place", [0, 1, 511, 1029, -1])
def test_a_single_large_value_is_found(device, place):
    x = torch.zeros(5003, dtype=torch.bfloat16)
    x[place] = -3.0
    assert amax(x.to(device)).item() == 3.0


@pytest.mark.sanitize
@pytest.mark.parametrize("offset", [1, 3])
def test_unaligned_memory(device, offset):
    x = torch.randn(1000).bfloat16().to(device)
    assert amax(x[offset:]).item() == x[offset:].abs().max().item()


@pytest.mark.sanitize
def test_scratch_is_left_zero(device):
    """The scratch memory holds no amax of an earlier call."""
    for size, shape in ((9.0, (5,)), (4.0, (300, 300)), (2.0, (7,)), (1.0, (0,))):
        x = torch.full(shape, size, device=device)
        expected = size if x.numel() else 0.0
        assert_bitwise(current_scales(x, fp8.E4M3, False, 0.0), expected_scales(expected, fp8.E4M3))


VALUES = [0.0, math.inf, 1.0, 3.0, 448.0, 1e-40, 1e-38, 2.0**-149, FLOAT_MAX, 1e30, 0.7]


@pytest.mark.parametrize("format", fp8.FORMATS)
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_scales(device, format, power_of_2, epsilon):
    for value in VALUES:
        x = torch.tensor([0.0, -value, math.nan])
        expected = expected_scales(value, format, power_of_2, epsilon)
        got = current_scales(x.to(device), format, power_of_2, epsilon)
        assert_bitwise(got, expected)
        single = current_scales(torch.tensor([value], device=device), format, power_of_2, epsilon)
        assert_bitwise(single, expected)


@pytest.mark.sanitize
def test_nan_amax_from_another_rank_gives_scale_one(device):
    scales = current_scales(torch.tensor([math.nan], device=device), fp8.E4M3, False, 0.0)
    assert_bitwise(scales, torch.ones(2))


@pytest.mark.gpu
def test_graph_replay_equals_eager():
    x = torch.randn(777, 300, dtype=torch.bfloat16, device="cuda")
    current_scales(x, fp8.E4M3, False, 0.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = current_scales(x, fp8.E4M3, False, 0.0)
    x.mul_(5.0)
    for _ in range(3):
        graph.replay()
        assert_bitwise(captured, expected_scales(x.abs().max().item(), fp8.E4M3))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    x = torch.zeros(2**31 + 24, dtype=torch.bfloat16, device="cuda")
    x[-1] = -2.0
    assert amax(x).item() == 2.0


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (TypeError, "float32, float16 or bfloat16 for x", {"x": torch.ones(4).int()}),
        (ValueError, "x to be contiguous", {"x": torch.ones(8)[::2]}),
        (TypeError, "an FP8 format, got int64", {"format": 8}),
        (ValueError, "a finite epsilon of at least 0, got -1", {"epsilon": -1.0}),
        (ValueError, "2 elements for scales", {"scales": torch.ones(3)}),
        (ValueError, "a tensor for amax, got none", {"scales": None}),
    ],
)
def test_errors(error, message, changed):
    args = {
        "x": torch.ones(4),
        "amax": None,
        "scales": torch.ones(2),
        "format": fp8.E4M3,
        "power_of_2": False,
        "epsilon": 0.0,
    }
    with pytest.raises(error, match=r"\[amax\] expected " + message):
        _C.amax(**(args | changed))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", fp8.HIGH_PRECISION, ids=str)
@pytest.mark.parametrize("power_of_2", [False, True])
def test_scales_of_many(device, dtype, power_of_2):
    """Each tensor gets the scales that it gets alone.

    There are more tensors than one launch takes, and a second call uses the same scratch memory.
    """
    tensors = [fp8.awkward(shape, dtype).to(device) for shape in SHAPES * 7]
    for _ in range(2):
        found = current_scales_many(tensors, fp8.E4M3, power_of_2, 0.25)
        for x, scales in zip(tensors, found, strict=True):
            assert_bitwise(scales, current_scales(x, fp8.E4M3, power_of_2, 0.25))


def test_bad_lists_of_tensors():
    with pytest.raises(ValueError, match=r"^\[current_scales_many\] expected tensors"):
        current_scales_many([], fp8.E4M3, False, 0.0)
    with pytest.raises(TypeError, match=r"^\[amax\] expected float32 for x, got bfloat16"):
        current_scales_many([torch.ones(2), torch.ones(2).bfloat16()], fp8.E4M3, False, 0.0)
