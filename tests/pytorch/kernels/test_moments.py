"""moments and cast_moments on both backends: every field, compared with float64."""

import math

import fp8_reference as fp8
import pytest
import torch
from cases import moments as cases
from rulers import assert_bitwise

from transformer_engine import _C
from transformer_engine.pytorch.kernels.moments import (
    CAST_MOMENTS,
    MOMENTS,
    cast_moments,
    cast_statistics,
    empty_cast_moments,
    empty_moments,
    merge_rows,
    moments,
    statistics,
)


def row_of(x):
    row = empty_moments(x.device)
    moments(x, row)
    return row


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("values", cases.VALUES)
def test_values(device, values, dtype):
    """On a GPU, one warp reads the smaller tensor and many warps read the larger one."""
    for shape in [(256,), (512, 500)]:
        x = cases.VALUES[values](shape).to(dtype)
        cases.assert_row(row_of(x.to(device)), x)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_shapes(device, shape, dtype):
    x = (3.0 + torch.randn(shape)).to(dtype)
    cases.assert_row(row_of(x.to(device)), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_alone(device, dtype):
    """Kernels compare bit patterns to find extremes, so each tensor here has only two patterns."""
    bits = torch.arange(-(2**15), 2**15, 257, dtype=torch.int32).to(torch.int16)
    for x in (bits.view(dtype), bits[:-1:2].view(dtype)):
        for k in range(0, x.numel() - 1, 5):
            pair = x[k : k + 2].repeat(16).clone()
            cases.assert_row(row_of(pair.to(device)), pair)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("values", ["normal", "mean 100", "far apart", "relu", "nan", "tiny"])
def test_sweeps_of_the_whole_grid(values, dtype):
    """The grid reads the tensor in several sweeps, the last of which is not full.

    With some values, warps need other arithmetic and read their elements again.
    """
    x = cases.VALUES[values]((8_000_003,)).to(dtype).cuda()
    cases.assert_row(row_of(x), x)
    part = x[1:]  # not aligned
    cases.assert_row(row_of(part), part)


@pytest.mark.sanitize
@pytest.mark.parametrize("values", ["normal", "nan", "tiny"])
@pytest.mark.parametrize("size", [0, 1, 37, 512, 13000])
def test_small(device, values, size):
    x = cases.VALUES[values]((size + 3,)).bfloat16()
    row = row_of(x.to(device))
    cases.assert_row(row, x)
    before = row.clone()
    moments(x.to(device)[:0], row)
    assert_bitwise(row, before)


@pytest.mark.sanitize
@pytest.mark.parametrize("offset", [1, 2, 4])
def test_unaligned_memory(device, offset):
    x = 100 + torch.randn(5000, dtype=torch.float32)
    part = x.bfloat16().to(device)[offset:]
    cases.assert_row(row_of(part), part)


def test_empty_row(device):
    assert_bitwise(row_of(torch.empty(0, device=device)), empty_moments())
    row = empty_moments().tolist()
    assert row[:12] == [0, 0, 0, 0, 0, math.inf, -math.inf, 0, math.inf, 0, 0, 0]
    assert math.isnan(statistics(row)["mean"])


@pytest.mark.parametrize("sizes", [(1000, 24), (8, 1, 50003), (0, 5, 0, 4096)], ids=str)
def test_micro_batches_merge(device, sizes):
    parts = [(100 + i + torch.randn(size)).to(device) for i, size in enumerate(sizes)]
    row = empty_moments(device)
    for part in parts:
        moments(part, row)
    cases.assert_row(row, torch.cat(parts))


def test_repeats_bit_for_bit(device):
    x = torch.randn(700, 1024, device=device)
    first = row_of(x)
    for _ in range(3 if device == "cpu" else 50):
        assert_bitwise(row_of(x), first)


def test_inactive(device):
    x = torch.randn(1000, device=device)
    row = empty_moments(device)
    active = torch.zeros(1, dtype=torch.int32, device=device)
    moments(x, row, active)
    assert_bitwise(row, empty_moments())
    active.fill_(1)
    moments(x, row, active)
    cases.assert_row(row, x)


def test_statistics_are_those_of_torch(device):
    x = (5 + torch.randn(300, 100)).bfloat16()
    got = statistics(row_of(x.to(device)).tolist())
    x = x.double()
    assert got["std"] == pytest.approx(float(x.std()), rel=1e-6)
    assert got["mean"] == pytest.approx(float(x.mean()), rel=1e-6)
    assert got["l1_norm"] == pytest.approx(float(x.norm(1)), rel=1e-6)
    assert got["l2_norm"] == pytest.approx(float(x.norm()), rel=1e-6)
    assert (got["min"], got["max"]) == (float(x.min()), float(x.max()))
    assert got["cur_amax"] == float(x.abs().max())
    ratio = float(x.abs().max() / x.abs().min())
    assert got["dynamic_range"] == pytest.approx(math.log2(ratio), rel=1e-12)
    assert list(got) == [
        "min",
        "max",
        "mean",
        "std",
        "l1_norm",
        "l2_norm",
        "cur_amax",
        "dynamic_range",
    ]


@pytest.mark.gpu
def test_a_hundred_million_elements():
    x = 100 + torch.randn(10**8, device="cuda")
    got = dict(zip(MOMENTS, row_of(x).tolist(), strict=False))
    mean = x.mean(dtype=torch.float64)
    assert got["mean"] == pytest.approx(float(mean), rel=1e-7)
    assert got["sum_abs"] == pytest.approx(float(x.abs().sum(dtype=torch.float64)), rel=1e-7)
    m2 = float((x.double() - mean).square().sum())
    assert got["m2"] == pytest.approx(m2, rel=1e-5)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    x = torch.zeros(2**31 + 24, dtype=torch.bfloat16, device="cuda")
    x[-1] = -2.0
    got = dict(zip(MOMENTS, row_of(x).tolist(), strict=False))
    assert (got["count"], got["nonzeros"], got["min"], got["max"]) == (x.numel(), 1, -2, 0)


def capture(call):
    """Captures a graph of `call`, after one call that allocates workspaces."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.gpu
def test_graph_follows_the_schedule_on_the_device():
    x = torch.randn(512, 1000, dtype=torch.bfloat16, device="cuda")
    row, active = empty_moments("cuda"), torch.ones(1, dtype=torch.int32, device="cuda")
    graph = capture(lambda: moments(x, row, active))
    for due in (1, 0, 1):
        row.copy_(empty_moments())
        active.fill_(due)
        x.mul_(2.0)
        graph.replay()
        if due:
            cases.assert_row(row, x)
        else:
            assert_bitwise(row, empty_moments())


# ---- Errors of casts ----


def assert_cast_row(row, x, codes, format, scale_inverse, squared_error=True):
    got = dict(zip(CAST_MOMENTS, row.tolist(), strict=False))
    x = x.float()
    decoded = fp8.decode(codes, format) * scale_inverse
    errors = (x.double() - decoded.double()).square().sum().item()
    limit = torch.tensor(fp8.LARGEST[format]) * scale_inverse * (1 + 2**-22)
    assert got["count"] == x.numel()
    assert got["underflows"] == int(((x != 0) & (decoded == 0)).sum())
    assert got["overflows"] == int((x.abs() > limit).sum())
    errors = errors if squared_error else math.nan
    assert got["squared_error"] == pytest.approx(errors, rel=1e-6, nan_ok=True)
    assert got["min_scale_inv"] == got["max_scale_inv"] == float(scale_inverse)


def cast(x, format, scale):
    codes = fp8.encode(x, format, scale)
    scale = torch.tensor(scale)
    return codes, torch.stack([1 / scale, scale])


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("format", fp8.FORMATS)
@pytest.mark.parametrize(
    "values", ["normal", "gradients", "tiny", "huge", "outliers", "inf", "nan"]
)
@pytest.mark.parametrize("scale", [0.7, 300.0])
def test_cast_values(device, values, format, dtype, scale):
    x = cases.VALUES[values]((100, 77)).to(dtype)
    codes, scales = cast(x, format, scale)
    on_device = x.to(device), codes.to(device), scales.to(device), format
    for squared_error in (True, False):
        row = empty_cast_moments(device)
        cast_moments(*on_device, row, squared_error=squared_error)
        assert_cast_row(row, x, codes, format, scales[0], squared_error)


@pytest.mark.sanitize
@pytest.mark.parametrize("offset", [0, 1, 8, 16])
@pytest.mark.parametrize("squared_error", [True, False])
def test_cast_small(device, offset, squared_error):
    x = (30 * torch.randn(3001)).bfloat16()[offset:]
    codes, scales = cast(x, fp8.E4M3, 8.0)
    row = empty_cast_moments(device)
    on_device = x.to(device), codes.to(device), scales.to(device), fp8.E4M3
    cast_moments(*on_device, row, squared_error=squared_error)
    assert_cast_row(row, x, codes, fp8.E4M3, scales[0], squared_error)


@pytest.mark.gpu
@pytest.mark.parametrize("format", fp8.FORMATS)
@pytest.mark.parametrize("values", ["normal", "relu", "outliers"])
def test_casts_by_sweeps_of_the_whole_grid(values, format):
    """For few or many of the codes, the kernel must also read the values."""
    x = cases.VALUES[values]((9_000_005,)).bfloat16()
    codes, scales = cast(x, format, 0.1)
    row = empty_cast_moments("cuda")
    cast_moments(x.cuda(), codes.cuda(), scales.cuda(), format, row, squared_error=False)
    assert_cast_row(row, x, codes, format, scales[0], squared_error=False)


def test_cast_merges_and_follows_its_flag(device):
    row = empty_cast_moments(device)
    active = torch.ones(1, dtype=torch.int32, device=device)
    for scale, due in ((2.0, 1), (64.0, 0), (1.0, 1)):
        x = torch.full((100,), 300.0, device=device)
        codes, scales = cast(x.cpu(), fp8.E4M3, scale)
        active.fill_(due)
        cast_moments(x, codes.to(device), scales.to(device), fp8.E4M3, row, active)
    got = cast_statistics(row.tolist())
    assert got["overflows%"] == 50
    assert got["underflows%"] == 0
    assert (got["scale_inv_min"], got["scale_inv_max"]) == (0.5, 1.0)
    assert got["mse"] == pytest.approx(((300 - 224) ** 2 + (300 - 288) ** 2) / 2)


# ---- Operators ----


def test_compilers_keep_the_calls(device):
    """In forward and backward, although no operator of the graph uses their results."""
    forward, backward = empty_moments(device), empty_moments(device)

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            moments(x, forward)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            moments(gradient, backward)
            return gradient * 2

    x, weight = torch.randn(64, device=device, requires_grad=True), torch.randn(64, device=device)
    compiled = torch.compile(
        lambda x: (Watched.apply(x) * weight).sum(), backend="aot_eager", fullgraph=True
    )
    compiled(x).backward()
    cases.assert_row(forward, x)
    cases.assert_row(backward, weight)


def slots(*rows):
    """A tensor `[len(rows), 16]`: rows with any number of fields, padded with zeros."""
    return torch.stack([torch.nn.functional.pad(row, (0, 16 - len(row))) for row in rows])


@pytest.mark.sanitize
def test_rows_merge_in_order(device):
    parts = [torch.randn(n) + 10 for n in (100, 1, 37)]
    casts = [torch.tensor([8.0, i, 1.0, 0.5 * i, 0.5**i, 2.0**i, 0, 0]).double() for i in range(3)]
    blocks = [torch.tensor([4.0, (5 * i) % 7]).double() for i in range(3)]
    kinds = torch.tensor([1, 0, 2], device=device)
    rows = torch.stack(
        [slots(c, row_of(x), b) for c, x, b in zip(casts, parts, blocks, strict=True)]
    )
    into = slots(empty_cast_moments(), empty_moments(), torch.zeros(2).double()).to(device)
    idle = into.clone()
    merge_rows(rows.to(device), kinds, idle, torch.zeros(1, dtype=torch.int32, device=device))
    assert torch.equal(idle, into)
    merge_rows(rows.to(device), kinds, into, torch.ones(1, dtype=torch.int32, device=device))
    into = into.cpu()
    assert into[0].tolist() == [24, 3, 3, 1.5, 0.25, 4] + [0] * 10
    assert into[2].tolist() == [12, 5] + [0] * 14
    cases.assert_row(into[1], torch.cat(parts))
    one_by_one = empty_moments()
    for x in parts:
        row = row_of(x)
        merge_rows(row.view(1, 1, 16), torch.zeros(1, dtype=torch.int64), one_by_one.view(1, 16))
    # A GPU multiplies and adds in one step, with one rounding.
    torch.testing.assert_close(into[1], one_by_one, rtol=1e-14 if device == "cuda" else 0, atol=0)


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (ValueError, r"shape \(slots, 16\) for into, got \(2, 8\)", {"into": torch.ones(2, 8)}),
        (ValueError, r"shape \(n, 2, 16\) for rows, got \(1, 16\)", {"rows": torch.ones(1, 16)}),
        (ValueError, "rows to be contiguous", {"rows": torch.ones(4, 2, 16).double()[::2]}),
        (ValueError, "2 elements for kinds", {"kinds": torch.zeros(1).long()}),
        (ValueError, "kinds between 0 and 2, got 3", {"kinds": torch.tensor([0, 3])}),
        (TypeError, "int32 for active", {"active": torch.ones(1)}),
    ],
)
def test_merge_errors(error, message, changed):
    args = {"rows": torch.ones(3, 2, 16), "into": torch.ones(2, 16)} | changed
    args = {name: tensor.double() for name, tensor in args.items() if name in ("rows", "into")}
    args = {"kinds": torch.zeros(2).long(), "active": None} | changed | args
    with pytest.raises(error, match=r"\[merge_rows\] expected " + message):
        _C.merge_rows(**args)


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (TypeError, "float32, float16 or bfloat16 for x", {"x": torch.ones(4).int()}),
        (ValueError, "x to be contiguous", {"x": torch.ones(8)[::2]}),
        (ValueError, "16 elements for the moments row", {"row": torch.zeros(8).double()}),
        (TypeError, "float64 for the moments row", {"row": torch.zeros(16)}),
        (TypeError, "int32 for active, got bool", {"active": torch.ones(1).bool()}),
        (ValueError, "1 element for active", {"active": torch.ones(2).int()}),
        (ValueError, "a tensor for the moments row, got none", {"row": None}),
    ],
)
def test_errors(error, message, changed):
    args = {"x": torch.ones(4), "row": empty_moments(), "active": None}
    with pytest.raises(error, match=r"\[moments\] expected " + message):
        _C.moments(**(args | changed))


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (TypeError, "one-byte codes, got float32", {"codes": torch.ones(4)}),
        (ValueError, r"shape \(4\) for codes", {"codes": torch.ones(5).byte()}),
        (ValueError, "2 elements for scales", {"scales": torch.ones(1)}),
        (TypeError, "an FP8 format, got float32", {"format": 2}),
        (ValueError, "8 elements for the moments row", {"row": empty_moments()}),
    ],
)
def test_cast_errors(error, message, changed):
    args = {
        "x": torch.ones(4),
        "codes": torch.ones(4).byte(),
        "scales": torch.ones(2),
        "format": fp8.E4M3,
        "row": empty_cast_moments(),
        "active": None,
    }
    with pytest.raises(error, match=r"\[cast_moments\] expected " + message):
        _C.cast_moments(**(args | changed))


def test_a_row_has_so_many_fields():
    with pytest.raises(ValueError, match=r"\[statistics\] expected a row of 16 fields, got 8"):
        statistics(empty_cast_moments().tolist())
