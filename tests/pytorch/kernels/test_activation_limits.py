"""Activations at the edges of fp32: infinities, overflow, subnormals, NaN, saturation."""

import fp8_reference as fp8
import pytest
import torch
from cases import activation as cases
from rulers import assert_bitwise

from transformer_engine.pytorch.kernels import activation as op


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
    """In the values and codes of its place only; the amax ignores it."""
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
