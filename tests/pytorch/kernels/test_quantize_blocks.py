"""quantize_blocks on both backends: the bits of codes and scales."""

from collections import namedtuple

import block_reference as blocks
import fp8_reference as fp8
import pytest
import torch
from rulers import assert_bitwise, assert_sum_close

from transformer_engine import _C
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.kernels.quantize_blocks import quantize_blocks
from transformer_engine.pytorch.scale_layout import block_layout

# Whole tiles, parts of tiles along both axes, vectors, odd widths (which allow no wide access).
SHAPES = [(256, 384), (1, 1), (1, 7), (300, 1), (17, 16), (130, 264), (129, 1040), (33, 65), (40,)]
DIMENSIONS = [1, 2]


BlockCodes = namedtuple("BlockCodes", "rowwise row_scales columnwise column_scales dbias")


def run(x, device, dimensions, format=fp8.E4M3, *, sides=(True, True), dbias=None, **scale):
    rule = {"power_of_2": True, "epsilon": 0.0} | scale
    codes = block_layout(dimensions).code(format)
    return BlockCodes(
        *quantize_blocks(x.to(device), codes, rule["power_of_2"], rule["epsilon"], *sides, dbias)
    )


def matrix(x):
    return x.unsqueeze(0).flatten(0, -2)


def assert_matches(got, x, dimensions, format=fp8.E4M3, **rule):
    codes, inverses = blocks.quantize(matrix(x), dimensions, format, **rule)
    if got.rowwise is not None:
        assert_bitwise(got.rowwise, codes.view(x.shape))
        assert_bitwise(got.row_scales, inverses)
    codes, inverses = blocks.quantize(matrix(x).t().contiguous(), dimensions, format, **rule)
    if got.columnwise is not None:
        assert_bitwise(got.columnwise, codes)
        assert_bitwise(got.column_scales, inverses)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", fp8.HIGH_PRECISION, ids=str)
@pytest.mark.parametrize("dimensions", DIMENSIONS)
@pytest.mark.parametrize("power_of_2", [True, False])
def test_matches_definition(device, shape, dtype, dimensions, power_of_2):
    x = fp8.awkward(shape, dtype)
    got = run(x, device, dimensions, power_of_2=power_of_2)
    assert_matches(got, x, dimensions, power_of_2=power_of_2)


@pytest.mark.parametrize("dtype", fp8.HIGH_PRECISION, ids=str)
@pytest.mark.parametrize("dimensions", DIMENSIONS)
def test_finite_values_in_e5m2(device, dtype, dimensions):
    x = (torch.randn(200, 272) * 1e-3).to(dtype)
    got = run(x, device, dimensions, fp8.E5M2, power_of_2=False)
    assert_matches(got, x, dimensions, fp8.E5M2, power_of_2=False)


@pytest.mark.parametrize("dimensions", DIMENSIONS)
@pytest.mark.parametrize("dbias", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sides", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("shape", [(256, 256), (130, 264), (33, 65)], ids=str)
def test_every_set_of_outputs(device, shape, sides, dbias, dimensions):
    x = fp8.awkward(shape, torch.bfloat16, finite=True)
    got = run(x, device, dimensions, sides=sides, dbias=dbias)
    present = (got.rowwise, got.row_scales, got.columnwise, got.column_scales)
    assert [t is not None for t in present] == [sides[0]] * 2 + [sides[1]] * 2
    assert (got.dbias is not None) == (dbias is not None)
    assert_matches(got, x, dimensions)


@pytest.mark.parametrize("shape", [*SHAPES, (1025, 80), (4100, 24)], ids=str)
@pytest.mark.parametrize("dtype", fp8.HIGH_PRECISION, ids=str)
@pytest.mark.parametrize("sides", [(True, False), (True, True)], ids=str)
@pytest.mark.parametrize("dimensions", DIMENSIONS)
def test_bias_gradient(device, shape, dtype, sides, dimensions):
    x = torch.randn(shape).to(dtype)
    dbias = run(x, device, dimensions, sides=sides, dbias=dtype).dbias
    assert dbias.dtype == dtype
    assert_sum_close(dbias, matrix(x))


@pytest.mark.parametrize("dimensions", DIMENSIONS)
@pytest.mark.parametrize("dtype", fp8.HIGH_PRECISION, ids=str)
def test_epsilon_bounds_the_amax(device, dimensions, dtype):
    x = torch.randn(130, 144) * torch.exp2(-10 * (torch.arange(144) // 16))
    got = run(x.to(dtype), device, dimensions, power_of_2=False, epsilon=1e-3)
    assert_matches(got, x.to(dtype), dimensions, power_of_2=False, epsilon=1e-3)


@pytest.mark.parametrize("power_of_2", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scales_that_overflow_are_the_largest_of_the_input(device, dtype, power_of_2):
    x = torch.full((1, 128), 2.0**-125).to(dtype)
    inverse = run(x, device, 1, power_of_2=power_of_2).row_scales[0, 0]
    largest = 2.0**127 if power_of_2 else torch.finfo(dtype).max
    assert_bitwise(inverse, torch.tensor(1.0) / torch.tensor(largest))


@pytest.mark.parametrize("dimensions", DIMENSIONS)
def test_blocks_that_say_nothing_keep_scale_1(device, dimensions):
    x = torch.ones(256, 512)
    x[:128, :128], x[:128, 128:256], x[128:, 256:384] = 0.0, torch.inf, torch.nan
    got = run(x, device, dimensions)
    assert_matches(got, x, dimensions)
    per_row = blocks.dequantize(
        torch.full((256, 512), 0x38).byte(), got.row_scales.cpu(), dimensions
    )
    assert (per_row[:128, :256] == 1).all()
    assert (per_row[128:, 256:384] == 1).all()
    assert (per_row[:, 384:] == 2.0**-8).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dimensions", DIMENSIONS)
def test_every_16_bit_value(device, dtype, dimensions):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = values[torch.randperm(2**16)].view(256, 256)
    for ordered in (x, values.view(256, 256)):
        assert_matches(run(ordered, device, dimensions), ordered, dimensions)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0), (0,)], ids=str)
@pytest.mark.parametrize("dimensions", DIMENSIONS)
def test_empty(device, shape, dimensions):
    got = run(torch.empty(shape, dtype=torch.bfloat16), device, dimensions, dbias=torch.float32)
    assert got.rowwise.shape == shape
    assert got.row_scales.numel() == got.column_scales.numel() == 0
    assert_bitwise(got.dbias, torch.zeros(shape[-1]))


@pytest.mark.parametrize("dimensions", DIMENSIONS)
@pytest.mark.parametrize("dtype", fp8.HIGH_PRECISION, ids=str)
@pytest.mark.parametrize("shape", [(256, 256), (130, 264), (33, 65)], ids=str)
def test_dequantize(device, shape, dtype, dimensions):
    format = block_layout(dimensions).code(fp8.E4M3)
    got = run(torch.randn(shape) * torch.logspace(-4, 3, shape[1]), device, dimensions)
    x = dequantize(got.rowwise, format, got.row_scales, dtype)
    expected = blocks.dequantize(got.rowwise.cpu(), got.row_scales.cpu(), dimensions)
    assert_bitwise(x, expected.to(dtype))
    columns = dequantize(got.columnwise, format, got.column_scales, torch.float32)
    expected = blocks.dequantize(got.columnwise.cpu(), got.column_scales.cpu(), dimensions)
    assert_bitwise(columns, expected)


@pytest.mark.sanitize
@pytest.mark.parametrize("offset", [1, 2, 4])
@pytest.mark.parametrize("dimensions", DIMENSIONS)
def test_unaligned_memory(device, offset, dimensions):
    x = torch.randn(136 * 160 + offset, dtype=torch.bfloat16)[offset:].view(136, 160)
    source = torch.empty(136 * 160 + offset, dtype=torch.bfloat16, device=device)
    source[offset:] = x.view(-1)
    got = run(source[offset:].view(136, 160), device, dimensions, dbias=torch.float32)
    assert_matches(got, x, dimensions)
    assert_sum_close(got.dbias, x)


@pytest.mark.sanitize
@pytest.mark.parametrize("shape", [(128, 128), (70, 200), (3, 5)], ids=str)
@pytest.mark.parametrize("dimensions", DIMENSIONS)
def test_small(device, shape, dimensions):
    x = fp8.awkward(shape, torch.bfloat16, finite=True)
    got = run(x, device, dimensions, dbias=torch.bfloat16)
    assert_matches(got, x, dimensions)
    format = block_layout(dimensions).code(fp8.E4M3)
    dequantize(got.rowwise, format, got.row_scales, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dimensions", DIMENSIONS)
@pytest.mark.parametrize("dtype", fp8.HIGH_PRECISION, ids=str)
def test_large_equals_the_cpu(dimensions, dtype):
    x = (torch.randn(1000, 4096) * torch.logspace(-6, 3, 4096)).to(dtype)
    on_cpu, on_gpu = (run(x, device, dimensions, power_of_2=False) for device in ("cpu", "cuda"))
    for got, expected in zip(on_gpu[:4], on_cpu[:4], strict=True):
        assert_bitwise(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dimensions", DIMENSIONS)
def test_graph_replay_equals_eager(dimensions):
    x = torch.randn(192, 320, dtype=torch.bfloat16, device="cuda")

    def call():
        return run(x, "cuda", dimensions, dbias=torch.bfloat16)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    x.mul_(torch.logspace(-3, 3, 320, device="cuda"))
    graph.replay()
    for got, expected in zip(captured, call(), strict=True):
        assert_bitwise(got, expected)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    rows, cols = 2**19 + 64, 4096
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    tail = torch.randn(64, cols).bfloat16()
    x[-64:] = tail
    got = run(x, "cuda", 1, dbias=torch.float32)
    assert_matches(
        BlockCodes(
            got.rowwise[-64:],
            got.row_scales[:, -64:],
            got.columnwise[:, -64:],
            got.column_scales[-1:],
            None,
        ),
        tail,
        1,
    )
    assert int(got.rowwise[:-64].count_nonzero()) == 0
    assert int(got.columnwise[:, :-64].count_nonzero()) == 0
    assert_sum_close(got.dbias, tail)


def test_as_library_operator(device):
    x = torch.randn(32, 48, device=device)
    format = block_layout(1).code(fp8.E4M3)
    expected = quantize_blocks(x, format, True, 0.0, True, False, None)
    got = torch.ops.te.quantize_blocks(x, format, True, 0.0, True, False, None, None, None)
    assert_bitwise(got[0], expected[0])
    assert_bitwise(got[1], expected[1])
    assert got[2] is None


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (TypeError, "float32, float16 or bfloat16 for x", {"x": torch.ones(4, 8).double()}),
        (ValueError, "x to be contiguous", {"x": torch.ones(8, 4).T}),
        (ValueError, "a row-wise or a column-wise", {"rowwise": None, "columnwise": None}),
        (TypeError, "an FP8 format, got float32", {"format": block_layout(1).code(2)}),
        (ValueError, "blocks of 1 or 2 dimensions, got 0", {"format": fp8.E4M3}),
        (ValueError, "epsilon >= 0, got -1", {"epsilon": -1.0}),
        (TypeError, "one-byte codes for the row-wise output", {"rowwise": torch.ones(4, 8)}),
        (ValueError, "8 x 4 codes for the column-wise", {"columnwise": torch.ones(4, 8).byte()}),
        (ValueError, r"shape \(1, 4\) for the row-wise scales", {"row_scales": torch.ones(4)}),
        (TypeError, "float32 for the column-wise", {"column_scales": torch.ones(1, 8).double()}),
        (ValueError, "a tensor for the column-wise scales", {"column_scales": None}),
        (ValueError, "8 elements for dbias", {"dbias": torch.ones(4)}),
    ],
)
def test_errors(error, message, changed):
    args = {
        "x": torch.ones(4, 8),
        "rowwise": torch.empty(4, 8, dtype=torch.uint8),
        "row_scales": torch.empty(block_layout(1).scale_shape(4, 8)),
        "columnwise": torch.empty(8, 4, dtype=torch.uint8),
        "column_scales": torch.empty(block_layout(1).scale_shape(8, 4)),
        "format": block_layout(1).code(fp8.E4M3),
        "power_of_2": True,
        "epsilon": 0.0,
    }
    with pytest.raises(error, match=r"\[quantize_blocks\] expected " + message):
        _C.quantize_blocks(**(args | changed))


def test_dequantize_refuses_scales_of_another_shape():
    codes = torch.zeros(4, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"\[dequantize\] expected shape \(1, 4\) for scales"):
        dequantize(codes, block_layout(1).code(fp8.E4M3), torch.ones(2), torch.float32)


@pytest.mark.parametrize("format", [-1, 1 << 27])
def test_a_format_that_does_not_exist_is_named(format: int) -> None:
    with pytest.raises(ValueError, match=f"expected a format of FP8 matrices, got {format}"):
        quantize_blocks(torch.ones(4, 128), format, False, 0.0, True, True, None)
