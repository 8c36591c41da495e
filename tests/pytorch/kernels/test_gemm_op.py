"""gemm: all dtypes and layouts, with and without a bias, compared with float64."""

import gemm_reference as ref
import pytest
import torch
from gemm_reference import E4M3, E5M2, assert_close, product, rounding, slack
from rulers import assert_bitwise

from transformer_engine.pytorch.kernels.gemm import gemm, gemm_into

FP8_PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]
KINDS = [
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    *[(pair, out) for pair in FP8_PAIRS for out in ref.PLAIN_TYPES],
]
LAYOUTS = ["TN", "NN", "NT", "TT"]
SHAPES = [(48, 32, 64), (33, 48, 80), (1, 16, 16), (272, 144, 528)]
ODD_SHAPES = [(17, 23, 31), (1, 1, 1), (5, 8, 3)]  # not for FP8


def cases():
    for kind, out in KINDS:
        plain = isinstance(kind, torch.dtype)
        for layout in LAYOUTS if plain else ["TN"]:
            for shape in SHAPES + ODD_SHAPES if plain else SHAPES:
                yield pytest.param(shape, kind, out, layout, id=f"{shape}-{kind}-{out}-{layout}")


def both(shape, kind, device, layout="TN"):
    a, b = ref.operands(*shape, kind, layout)
    return a.to(device), b.to(device)


@pytest.mark.parametrize(("shape", "kind", "out", "layout"), list(cases()))
def test_product(device, shape, kind, out, layout):
    a, b = both(shape, kind, device, layout)
    d = gemm(a.data, b.data, out, **ref.arguments(a, b))
    assert d.shape == shape[:2]
    assert d.dtype is out
    assert_close(d, product(a, b), slack(a, b, device))


@pytest.mark.parametrize("pair", FP8_PAIRS, ids=str)
def test_fast_accumulation(device, pair):
    a, b = both((64, 96, 1024), pair, device)
    d = gemm(a.data, b.data, torch.bfloat16, **ref.arguments(a, b), fast_accumulation=True)
    assert_close(d, product(a, b), slack(a, b, device, fast=True))


def test_without_tf32(device):
    a, b = both((64, 96, 256), torch.float32, device)
    d = gemm(a.data, b.data, torch.float32, allow_tf32=False)
    assert_close(d, product(a, b), slack(a, b, "cpu"))


@pytest.mark.parametrize(("kind", "out"), KINDS, ids=str)
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bias(device, kind, out, bias_dtype):
    a, b = both((48, 32, 64), kind, device)
    bias = torch.randn(32).to(bias_dtype)
    d = gemm(a.data, b.data, out, **ref.arguments(a, b), bias=bias.to(device))
    read_as = out if isinstance(kind, torch.dtype) or out is torch.float16 else torch.bfloat16
    expected = product(a, b) + bias.to(read_as).double()
    assert_close(d, expected, slack(a, b, device))


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize(("kind", "out"), KINDS, ids=str)
def test_into(device, kind, out, accumulate):
    layout = "NT" if isinstance(kind, torch.dtype) else "TN"
    a, b = both((48, 32, 64), kind, device, layout)
    start = torch.randn(48, 32).to(out)
    if not accumulate:
        start.fill_(torch.nan)  # must not be read
    d = start.clone().to(device)
    assert gemm_into(d, a.data, b.data, **ref.arguments(a, b), accumulate=accumulate) is None
    expected = product(a, b) + (start.double() if accumulate else 0)
    inside = slack(a, b, device) + (rounding(product(a, b), out, device) if accumulate else 0)
    assert_close(d, expected, inside)


@pytest.mark.parametrize(("kind", "out"), KINDS, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_addend(device, kind, out, with_bias):
    a, b = both((48, 32, 64), kind, device)
    addend = torch.randn(48, 32).to(out)
    bias = torch.randn(32).bfloat16() if with_bias else torch.zeros(32)
    more = {"addend": addend.to(device), "bias": bias.to(device) if with_bias else None}
    d = gemm(a.data, b.data, out, **ref.arguments(a, b), **more)
    assert_close(d, product(a, b) + addend.double() + bias.double(), slack(a, b, device))
    assert_bitwise(more["addend"].cpu(), addend)


@pytest.mark.sanitize
def test_leading_axes(device):
    x = torch.randn(3, 4, 32).bfloat16()
    w = torch.randn(48, 32).bfloat16()
    dy = torch.randn(3, 4, 48).bfloat16()
    x_d, w_d, dy_d = x.to(device), w.to(device), dy.to(device)
    y = gemm(x_d, w_d, torch.bfloat16)
    dx = gemm(dy_d, w_d, torch.bfloat16, b_transposed=True)
    dw = gemm(dy_d, x_d, torch.float32, a_transposed=True, b_transposed=True)
    assert_close(y, x.double() @ w.double().t(), 1e-4)
    assert_close(dx, dy.double() @ w.double(), 1e-4)
    assert_close(dw, dy.double().view(12, 48).t() @ x.double().view(12, 32), 1e-4)
    row = gemm(x_d[0, 0], w_d, torch.bfloat16)
    assert row.shape == (48,)
    assert_close(row, x[0, 0].double() @ w.double().t(), 1e-4)


@pytest.mark.parametrize("shape", [(0, 32, 16), (16, 0, 32), (0, 0, 16)], ids=str)
@pytest.mark.parametrize("kind", [torch.bfloat16, (E4M3, E4M3)], ids=str)
def test_empty_result(device, shape, kind):
    a, b = both(shape, kind, device)
    d = gemm(a.data, b.data, torch.bfloat16, **ref.arguments(a, b))
    assert d.shape == shape[:2]


@pytest.mark.parametrize("kind", [torch.bfloat16, (E4M3, E4M3)], ids=str)
def test_empty_sum(device, kind):
    a, b = both((16, 32, 0), kind, device)
    options = ref.arguments(a, b)
    assert gemm(a.data, b.data, torch.bfloat16, **options).eq(0).all()
    bias = torch.randn(32).bfloat16().to(device)
    assert gemm(a.data, b.data, torch.bfloat16, **options, bias=bias).eq(bias).all()
    d = torch.ones(16, 32, device=device)
    gemm_into(d, a.data, b.data, **options)
    assert d.eq(1).all()
    gemm_into(d, a.data, b.data, **options, accumulate=False)
    assert d.eq(0).all()


def test_nan_and_infinity_pass_through(device):
    x = torch.zeros(16, 32)
    x[3, 5], x[7, 1] = torch.nan, torch.inf
    w = torch.ones(48, 32).bfloat16().to(device)
    y = gemm(x.bfloat16().to(device), w, torch.bfloat16).cpu()
    assert y[3].isnan().all()
    assert y[7].eq(torch.inf).all()
    assert y[[0, 1, 2, 4]].eq(0).all()


def test_under_compile(device):
    a, b = both((48, 32, 64), torch.bfloat16, device)
    main_grad = torch.zeros(48, 32, device=device)

    def work(x, w, d):
        y = gemm(x, w, torch.bfloat16)
        gemm_into(d, x, w)
        return y

    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")
    y = compiled(a.data, b.data, main_grad)
    assert_bitwise(y, work(a.data, b.data, torch.zeros_like(main_grad)))
    assert_close(main_grad, product(a, b), slack(a, b, device))


def bad_calls():
    def bf16(*shape):
        return torch.zeros(*shape, dtype=torch.bfloat16)

    def codes(*shape):
        return torch.zeros(*shape, dtype=torch.uint8)

    one = torch.ones(1)
    x, w = bf16(8, 16), bf16(24, 16)
    fp8 = {"a_scales": one, "b_scales": one, "a_format": E4M3, "b_format": E4M3}
    yield (x, bf16(24, 32)), {}, ValueError, r"operands that share k, got k = 16 .* k = 32"
    yield (x, w.half()), {}, TypeError, "operands of one dtype, got bfloat16 and float16"
    yield (x.t(), bf16(24, 8)), {}, ValueError, "a to be contiguous"
    yield (x.double(), w.double()), {}, TypeError, "float32, float16 or bfloat16 for a"
    yield (x, codes(24, 16)), {"b_scales": one, "b_format": E4M3}, TypeError, "both operands in FP8"
    yield (x, x), {"b_format": E4M3, "b_scales": one}, TypeError, "FP8 codes of one byte, got bfl"
    for format in (2, -2, 48 + E4M3):  # float32; nothing; blocks of no layout
        yield (
            (x, x),
            {"b_format": format},
            ValueError,
            rf"-1 or a format of FP8 codes, got {format}",
        )
    yield (codes(8, 16), codes(32, 16)), {**fp8, "a_scales": None}, ValueError, "scales with FP8 a"
    yield (codes(8, 24), codes(32, 24)), fp8, ValueError, r"multiples of 16.*n = 32, k = 24"
    yield (codes(8, 16), codes(24, 16)), fp8, ValueError, r"multiples of 16.*m = 8, n = 24, k = 16"
    yield (
        (codes(16, 8), codes(32, 16)),
        {**fp8, "a_transposed": True},
        ValueError,
        "hand in the stored transpose",
    )
    both_e5m2 = {**fp8, "a_format": E5M2, "b_format": E5M2}
    yield (
        (codes(8, 16), codes(32, 16)),
        both_e5m2,
        NotImplementedError,
        "one operand in float8_e5m2",
    )
    yield (x, w), {"bias": torch.zeros(23)}, ValueError, "24 elements for bias"
    yield (x, w), {"addend": bf16(8, 23)}, ValueError, r"addend of 8 x 24 elements, got .*8, 23"
    yield (x, w), {"addend": torch.zeros(8, 24)}, TypeError, "bfloat16 for the addend"


@pytest.mark.parametrize(("tensors", "options", "error", "message"), list(bad_calls()))
def test_error(device, tensors, options, error, message):
    def move(value):
        return value.to(device) if isinstance(value, torch.Tensor) else value

    a, b = tensors
    a = a.to(device) if a.is_contiguous() else a.t().to(device).t()
    with pytest.raises(error, match=rf"\[gemm\] expected .*{message}"):
        gemm(a, b.to(device), torch.bfloat16, **{name: move(v) for name, v in options.items()})


def test_error_of_the_result(device):
    x, w = torch.zeros(8, 16, device=device), torch.zeros(24, 16, device=device)
    with pytest.raises(TypeError, match="a result in float32 or float32 for float32 operands"):
        gemm(x, w, torch.bfloat16)
    with pytest.raises(ValueError, match=r"the result of 8 x 24 elements, got shape \(8, 23\)"):
        gemm_into(torch.zeros(8, 23, device=device), x, w)
    if device == "cuda":
        with pytest.raises(ValueError, match="b on cuda:0, got it on cpu"):
            gemm(x, w.cpu(), torch.float32)


def test_the_definition_knows_no_autocast():
    """On the CPU gemm calls torch's product, which torch.autocast must not run in its dtype."""
    a, b = torch.randn(16, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    bias = torch.randn(32).bfloat16()
    expected = gemm(a, b, torch.bfloat16, bias=bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert_bitwise(gemm(a, b, torch.bfloat16, bias=bias), expected)
