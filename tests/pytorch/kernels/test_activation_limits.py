"""Activations of extreme values: infinities, overflow, subnormals, NaN, saturation."""

import fp8_reference as fp8
import pytest
import torch
from cases import activation as cases
from rulers import assert_bitwise, assert_codes_close

from transformer_engine.pytorch.kernels import activation as op

F32 = torch.float32


@pytest.mark.parametrize("name", list(cases.PLAIN))
def test_large_values_and_infinities_end_at_the_limits(name, device):
    inf = float("inf")
    x = torch.tensor([[-inf, -3e38, -1e20, -1e4, -110.0, 110.0, 1e4, 1e20, 3e38, inf]] * 2)
    x = x.to(device)
    kind = op.activation_kind(name)
    y = op.activation_forward(x, kind)[0].cpu()
    positive = torch.relu(x.cpu())
    expected = positive.square() if name == "srelu" else positive
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-30)
    dx = op.activation_backward(torch.ones_like(x), x, kind)[0].cpu()
    slope = 2 * positive if name == "srelu" else (x.cpu() > 0).float()
    torch.testing.assert_close(dx, slope, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("name", list(cases.PLAIN))
def test_small_values_keep_their_sign_and_slope(name, device):
    x = torch.tensor([[-1e-3, -1e-20, -1e-40, -0.0, 0.0, 1e-40, 1e-20, 1e-3]], device=device)
    kind = op.activation_kind(name)
    y = op.activation_forward(x, kind)[0]
    torch.testing.assert_close(y.double(), cases.reference(name, x.double()), rtol=1e-5, atol=2e-38)
    dy = torch.ones_like(x)
    dx = op.activation_backward(dy, x, kind)[0]
    torch.testing.assert_close(
        dx.double(), cases.reference_backward(name, dy, x), rtol=1e-5, atol=2e-38
    )


@pytest.mark.parametrize("name", cases.KINDS)
def test_nan_stays_where_it_is(name, device):
    """Only the value and the code of the same element are NaN; the amax ignores it."""
    x = torch.randn(32, cases.width(name, 64)).bfloat16().to(device)
    dy = torch.randn(32, 64).bfloat16().to(device)
    x[5, 7] = float("nan")
    kind = op.activation_kind(name)
    scale, amax = torch.ones(1, device=device), torch.zeros(1, device=device)
    y, rowwise, columnwise, _ = op.activation_forward(
        x, kind, scale=scale, amax=amax, rowwise=True, columnwise=True
    )
    expected = torch.zeros(32, 64, dtype=torch.bool, device=device)
    expected[5, 7] = True
    assert torch.equal(y.isnan(), expected)
    assert torch.equal(rowwise.view(torch.float8_e4m3fn).float().isnan(), expected)
    assert columnwise[7, 5].item() == 0x7F
    assert torch.isfinite(amax).all() and amax.item() > 0
    dx = op.activation_backward(dy, x, kind)[0]
    # The slope of relu at NaN is 1, as in torch; the second half of a gated gradient has act(NaN).
    expected_nans = {"relu": 0}.get(cases.GATED.get(name, name), 1) + (name in cases.GATED)
    assert dx.isnan().sum().item() == expected_nans


def test_an_overflowed_gradient_does_not_reach_what_relu_cut_off(device):
    x = torch.tensor([[-1.0, 1.0]], device=device)
    dy = torch.full_like(x, float("inf"))
    for name in ("relu", "srelu"):
        dx = op.activation_backward(dy, x, op.activation_kind(name))[0]
        assert dx.tolist() == [[0.0, float("inf")]]


@pytest.mark.parametrize("format", fp8.FORMATS)
def test_saturation(format, device):
    x = torch.tensor([[1e5, -1.0, float("inf"), 3.0]], device=device)
    scale = torch.tensor([1000.0], device=device)
    relu = op.activation_kind("relu")
    codes = op.activation_forward(x, relu, False, format, scale, rowwise=True)[1]
    assert_bitwise(codes.cpu(), fp8.encode(torch.relu(x.cpu()), format, 1000.0))


CLAMPS = [{"limit": 1.5, "alpha": 1.3, "offset": 0.25}, {"limit": 2.0, "alpha": 1.0, "offset": 0.0}]
FP8 = {"scale": 3.0, "rowwise": True, "columnwise": True}


def clamped_both_ways(x, dy, device, numbers, **fp8_arguments):
    """Results of forward and backward, computed on `device` and copied to the CPU."""
    kind, x, dy = op.activation_kind("clamped_swiglu"), x.to(device), dy.to(device)
    if fp8_arguments:
        fp8_arguments["scale"] = torch.tensor([fp8_arguments["scale"]], device=device)
    forward = op.activation_forward(x, kind, **fp8_arguments, **numbers)
    backward = op.activation_backward(dy, x, kind, dbias=F32, **fp8_arguments, **numbers)
    return [None if t is None else t.cpu() for t in (*forward, *backward)]


@pytest.mark.parametrize("numbers", CLAMPS, ids=str)
def test_clamps_where_the_numbers_say(numbers, device):
    """Inputs above, at and below the limit; the bias gradient is the sum of the clamped `dx`."""
    for dtype, bound in ((F32, 4e-6), (torch.bfloat16, 4e-3)):
        x, dy = (torch.randn(33, 2 * 40) * 2).to(dtype), torch.randn(33, 40).to(dtype)
        x[0, :2], x[0, 40:42] = numbers["limit"], -numbers["limit"]
        y, *_, dx, _, _, _, dbias = clamped_both_ways(x, dy, device, numbers)
        expected = cases.reference("clamped_swiglu", x.double(), **numbers)
        gradient = cases.reference_backward("clamped_swiglu", dy, x, **numbers)
        assert (gradient == 0).sum() > 500  # many inputs are clamped
        torch.testing.assert_close(y.double(), expected, rtol=bound, atol=1e-6)
        torch.testing.assert_close(dx.double(), gradient, rtol=bound, atol=2e-6)
        assert torch.equal(dx == 0, gradient == 0)
        torch.testing.assert_close(dbias.double(), gradient.sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("numbers", CLAMPS, ids=str)
def test_clamps_before_the_cast(numbers, device):
    x, dy = torch.randn(66, 2 * 48).bfloat16() * 2, torch.randn(66, 48).bfloat16()
    _, codes, transposed, _, _, back, back_transposed, *_ = clamped_both_ways(
        x, dy, device, numbers, **FP8
    )
    forward = cases.reference("clamped_swiglu", x.double(), **numbers)
    assert_codes_close(codes, fp8.encode(forward, fp8.E4M3, 3.0))
    backward = cases.reference_backward("clamped_swiglu", dy, x, **numbers)
    assert_codes_close(back, fp8.encode(backward, fp8.E4M3, 3.0))
    assert torch.equal(transposed, codes.t()) and torch.equal(back_transposed, back.t())


def test_clamped_halves_at_infinity(device):
    inf = float("inf")
    x = torch.tensor([[-inf, inf, 3e38, 1.0, 1.0, 1.0, -inf, inf]])
    y, *_, dx, _, _, _, _ = clamped_both_ways(x, torch.ones(1, 4), device, {})
    gelu = 1 / (1 + torch.exp(torch.tensor(-1.702)))
    top = 7 / (1 + torch.exp(torch.tensor(-1.702 * 7)))
    torch.testing.assert_close(y, torch.stack([gelu * 0, top * 2, top * -6, gelu * 8])[None])
    assert dx[0, :3].tolist() == [0, 0, 0] and dx[0, 6:].tolist() == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("numbers", CLAMPS, ids=str)
def test_clamped_agrees_on_both_devices(numbers):
    for dtype in fp8.HIGH_PRECISION:
        for shape in ((64, 128), (33, 257), (130, 72)):
            x, dy = (
                (torch.randn(shape[0], 2 * shape[1]) * 2).to(dtype),
                torch.randn(shape).to(dtype),
            )
            cpu = clamped_both_ways(x, dy, "cpu", numbers, **FP8)
            cuda = clamped_both_ways(x, dy, "cuda", numbers, **FP8)
            for i, (got, want) in enumerate(zip(cuda, cpu, strict=True)):
                if want.dtype is torch.uint8:
                    assert_codes_close(got, want)
                else:
                    bound = 1e-4 if i == 8 else {F32: 8e-6, torch.float16: 1e-3}.get(dtype, 8e-3)
                    torch.testing.assert_close(got, want, rtol=bound, atol=1e-4 if i == 8 else 2e-6)
