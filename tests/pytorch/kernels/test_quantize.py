"""quantize on both backends: the bits of codes, amax, scales and bias gradient."""

import fp8_reference as fp8
import pytest
import torch
from rulers import assert_bitwise, assert_sum_close

from transformer_engine import _C
from transformer_engine.pytorch.kernels.quantize import quantize

# Whole tiles, parts of tiles along both axes, vectors, odd widths (which allow no wide access).
SHAPES = [
    (256, 256),
    (128, 384),
    (1, 1),
    (1, 7),
    (300, 1),
    (17, 16),
    (130, 264),
    (64, 72),
    (129, 1040),
    (33, 65),
    (2, 3, 48),
    (40,),
]
SCALE = 0.75


def run(x, device, format=fp8.E4M3, *, rowwise=True, columnwise=True, dbias=None, scale=SCALE):
    x = x.to(device)
    scale = torch.tensor([scale], device=device)
    amax = torch.zeros(1, device=device)
    results = quantize(x, format, scale, amax, None, rowwise, columnwise, dbias)
    return (*results, amax)


def matrix(x):
    return x.unsqueeze(0).flatten(0, -2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", fp8.HIGH_PRECISION, ids=str)
@pytest.mark.parametrize("format", fp8.FORMATS)
def test_matches_definition(device, shape, dtype, format):
    x = fp8.awkward(shape, dtype)
    rowwise, columnwise, scales, _, amax = run(x, device, format)
    codes = fp8.encode(x, format, SCALE)
    assert_bitwise(rowwise, codes)
    assert_bitwise(columnwise, matrix(codes).T.contiguous())
    assert_bitwise(scales, torch.tensor([1 / SCALE, SCALE]))
    assert amax.item() == fp8.amax(x)


@pytest.mark.parametrize("shape", [(256, 256), (130, 264), (33, 65)], ids=str)
@pytest.mark.parametrize("dbias", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("rowwise", [False, True])
def test_every_set_of_outputs(device, shape, rowwise, columnwise, dbias):
    if not rowwise and not columnwise:
        pytest.skip("nothing to compute; an error, tested below")
    x = fp8.awkward(shape, torch.bfloat16, finite=True)
    codes = fp8.encode(x, fp8.E4M3, SCALE)
    got_row, got_column, _, got_bias, amax = run(
        x, device, rowwise=rowwise, columnwise=columnwise, dbias=dbias
    )
    assert (got_bias is not None) == (dbias is not None)
    assert (got_row is not None) == rowwise
    assert (got_column is not None) == columnwise
    if rowwise:
        assert_bitwise(got_row, codes)
    if columnwise:
        assert_bitwise(got_column, codes.T.contiguous())
    assert amax.item() == fp8.amax(x)


@pytest.mark.parametrize("shape", [*SHAPES, (1025, 80), (4100, 24)], ids=str)
@pytest.mark.parametrize("dtype", fp8.HIGH_PRECISION, ids=str)
def test_bias_gradient(device, shape, dtype):
    x = torch.randn(shape).to(dtype)
    for columnwise in (False, True):
        *_, dbias, _ = run(x, device, columnwise=columnwise, dbias=dtype)
        assert dbias.dtype == dtype
        assert_sum_close(dbias, matrix(x))


def test_bias_gradient_repeats_bit_for_bit(device):
    """The workspace still holds partial sums of an earlier call."""
    inputs = [torch.randn(2000, 272, device=device) for _ in range(2)]
    first = [run(x, device, dbias=torch.float32)[3] for x in inputs]
    for _ in range(3 if device == "cpu" else 50):
        for x, expected in zip(inputs, first, strict=True):
            assert_bitwise(run(x, device, dbias=torch.float32)[3], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", fp8.FORMATS)
def test_every_16_bit_value(device, dtype, format):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)
    rowwise, columnwise, *_ = run(x, device, format, scale=1.0)
    codes = fp8.encode(x, format, 1.0)
    assert_bitwise(rowwise, codes)
    assert_bitwise(columnwise, codes.T.contiguous())


@pytest.mark.gpu
@pytest.mark.parametrize("format", fp8.FORMATS)
def test_many_float_bit_patterns_equal_the_cpu(format):
    """2^24 patterns at an odd distance, which have all exponents and all low bits."""
    bits = torch.arange(2**24, dtype=torch.int64) * 257 - 2**31
    x = bits.to(torch.int32).view(torch.float32).view(4096, 4096)
    on_cpu, on_gpu = (run(x, device, format, scale=1.0) for device in ("cpu", "cuda"))
    assert_bitwise(on_gpu[0], on_cpu[0])
    assert_bitwise(on_gpu[1], on_cpu[1])


@pytest.mark.sanitize
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0), (0,)], ids=str)
def test_empty(device, shape):
    x = torch.empty(shape, dtype=torch.bfloat16)
    rowwise, columnwise, scales, dbias, amax = run(x, device, dbias=torch.float32)
    assert rowwise.shape == shape
    assert columnwise.shape == matrix(x).T.shape
    assert_bitwise(scales, torch.tensor([1 / SCALE, SCALE]))
    assert_bitwise(dbias, torch.zeros(shape[-1]))
    assert amax.item() == 0


def test_amax_keeps_the_larger(device):
    x = torch.tensor([[1.0, -3.0]], device=device)
    scale = torch.ones(1, device=device)
    for before, after in [(0.0, 3.0), (5.0, 5.0)]:
        amax = torch.tensor([before], device=device)
        quantize(x, fp8.E4M3, scale, amax, None, True, False, None, None, None)
        assert amax.item() == after


@pytest.mark.parametrize("shape", [(64, 128), (5, 3)], ids=str)
def test_given_scales_are_read(device, shape):
    x = torch.randn(shape, dtype=torch.bfloat16)
    scales = torch.tensor([0.125, 8.0], device=device)
    rowwise, columnwise, own, _ = quantize(
        x.to(device), fp8.E5M2, None, None, scales, True, True, None
    )
    assert own is None
    codes = fp8.encode(x, fp8.E5M2, 8.0)
    assert_bitwise(rowwise, codes)
    assert_bitwise(columnwise, codes.T.contiguous())
    assert_bitwise(scales, torch.tensor([0.125, 8.0]))


@pytest.mark.sanitize
@pytest.mark.parametrize("offset", [1, 2, 4])
def test_unaligned_memory(device, offset):
    x = torch.randn(48 * 80 + offset, dtype=torch.bfloat16)[offset:].view(48, 80)
    source = torch.empty(48 * 80 + offset, dtype=torch.bfloat16, device=device)
    source[offset:] = x.view(-1)
    rowwise, columnwise, _, dbias, _ = run(
        source[offset:].view(48, 80), device, dbias=torch.float32
    )
    codes = fp8.encode(x, fp8.E4M3, SCALE)
    assert_bitwise(rowwise, codes)
    assert_bitwise(columnwise, codes.T.contiguous())
    assert_sum_close(dbias, x)


@pytest.mark.sanitize
@pytest.mark.parametrize("shape", [(128, 128), (70, 48), (3, 5)], ids=str)
def test_small(device, shape):
    x = fp8.awkward(shape, torch.bfloat16, finite=True)
    rowwise, columnwise, *_ = run(x, device, dbias=torch.bfloat16)
    assert_bitwise(rowwise, fp8.encode(x, fp8.E4M3, SCALE))
    assert_bitwise(columnwise, rowwise.T.contiguous())


@pytest.mark.gpu
def test_graph_replay_equals_eager():
    x = torch.randn(192, 320, dtype=torch.bfloat16, device="cuda")
    scale, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")

    def call():
        return quantize(x, fp8.E4M3, scale, amax, None, True, True, torch.bfloat16)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    x.mul_(3.0)
    scale.fill_(2.0)
    graph.replay()
    for got, expected in zip(captured, call(), strict=True):
        assert_bitwise(got, expected)
    assert amax.item() == x.abs().max().item()


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    rows, cols = 2**19 + 64, 4096
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    tail = torch.randn(64, cols).bfloat16()
    x[-64:] = tail
    rowwise, columnwise, _, dbias, amax = run(x, "cuda", dbias=torch.float32)
    codes = fp8.encode(tail, fp8.E4M3, SCALE)
    assert_bitwise(rowwise[-64:], codes)
    assert_bitwise(columnwise[:, -64:], codes.T.contiguous())
    assert int(rowwise[:-64].count_nonzero()) == int(columnwise[:, :-64].count_nonzero()) == 0
    assert_sum_close(dbias, tail)
    assert amax.item() == fp8.amax(tail)


def test_as_library_operator(device):
    x = torch.randn(32, 48, device=device)
    scale, amax = torch.ones(1, device=device), torch.zeros(1, device=device)
    expected = quantize(x, fp8.E4M3, scale, None, None, True, False, None)
    got = torch.ops.te.quantize(x, fp8.E4M3, scale, amax, None, True, False, None, None, None)
    assert_bitwise(got[0], expected[0])
    assert got[1] is None
    assert amax.item() == x.abs().max().item()


def refused(error, message, **changed):
    x = torch.ones(4, 8)
    args = {
        "x": x,
        "rowwise": torch.empty(4, 8, dtype=torch.uint8),
        "columnwise": torch.empty(8, 4, dtype=torch.uint8),
        "scales": torch.ones(2),
        "scale": torch.ones(1),
        "amax": torch.ones(1),
        "format": fp8.E4M3,
    }
    with pytest.raises(error, match=r"\[quantize\] expected " + message):
        _C.quantize(**(args | changed))


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (
            TypeError,
            "float32, float16 or bfloat16 for x, got float64",
            {"x": torch.ones(4, 8).double()},
        ),
        (ValueError, "x to be contiguous", {"x": torch.ones(8, 4).T}),
        (ValueError, "a row-wise or a column-wise output", {"rowwise": None, "columnwise": None}),
        (TypeError, "an FP8 format, got float32", {"format": 2}),
        (TypeError, "one-byte codes for the row-wise output", {"rowwise": torch.ones(4, 8)}),
        (ValueError, "4 x 8 codes for the row-wise", {"rowwise": torch.ones(8, 4).byte()}),
        (ValueError, "8 x 4 codes for the column-wise", {"columnwise": torch.ones(4, 8).byte()}),
        (ValueError, "2 elements for scales", {"scales": torch.ones(1)}),
        (TypeError, "float32 for scale, got bfloat16", {"scale": torch.ones(1).bfloat16()}),
        (ValueError, "1 element for amax, got shape", {"amax": torch.ones(3)}),
        (ValueError, "8 elements for dbias", {"dbias": torch.ones(4)}),
        (TypeError, "float32, float16 or bfloat16 for dbias", {"dbias": torch.ones(8).int()}),
    ],
)
def test_errors(error, message, changed):
    refused(error, message, **changed)


@pytest.mark.gpu
def test_outputs_on_another_device():
    refused(ValueError, "scale on cpu, got it on cuda:0", scale=torch.ones(1, device="cuda"))
