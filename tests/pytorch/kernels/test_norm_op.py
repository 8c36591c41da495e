"""LayerNorm and RMSNorm: definition, gradients, special values, compilation, CUDA graphs."""

import math

import fp8_reference as fp8
import pytest
import torch
from cases.norm import (
    BF16,
    DTYPES,
    EPSILON,
    F32,
    KINDS,
    SHAPES,
    Case,
    check_backward,
    check_forward,
    close,
    same,
)
from rulers import assert_bitwise, assert_codes_close

from transformer_engine.pytorch.kernels.norm import (
    LAYER_NORM,
    RMS_NORM,
)


@KINDS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_definition(device, kind, shape):
    case = Case(kind, shape, (BF16, BF16, BF16), device)
    check_backward(case, *check_forward(case))


@KINDS
@pytest.mark.parametrize("shape", [(37, 512), (19, 33)], ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_every_set_of_dtypes(device, kind, shape, dtypes):
    for zero_centered in (False, True):
        case = Case(kind, shape, dtypes, device, zero_centered=zero_centered)
        check_backward(case, *check_forward(case))


@KINDS
@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 2.0])
def test_epsilon(device, kind, epsilon):
    case = Case(kind, (20, 128), (F32, F32, F32), device, epsilon=epsilon)
    check_backward(case, *check_forward(case))


@KINDS
def test_formula_is_autograd(kind):
    case = Case(kind, (6, 40), (F32, F32, F32), "cpu", zero_centered=True)
    x = case.x.double().requires_grad_()
    function = (
        torch.nn.functional.layer_norm if kind == LAYER_NORM else torch.nn.functional.rms_norm
    )
    beta = () if kind == RMS_NORM else (case.beta.double(),)
    y = function(x, (40,), case.weight(), *beta, eps=EPSILON)
    y.backward(case.dy.double())
    torch.testing.assert_close(y.detach(), case.y())
    torch.testing.assert_close(x.grad, case.dx())


@pytest.mark.parametrize("shape", [(9, 4096), (9, 100), (5, 1023)], ids=str)
def test_large_mean(device, shape):
    """With a mean of 10^4 and a deviation of 1, y is as accurate as with other means."""
    case = Case(LAYER_NORM, shape, (F32, F32, F32), device)
    case.x = case.x / 2 + 1e4
    mean, rstd = check_forward(case)
    # The backward reads the mean in fp32, which has an error of up to 2^-11.
    check_backward(case, mean, rstd, slack=1e-3)


@KINDS
@pytest.mark.parametrize("shape", [(33, 65), (40, 1024), (3, 4096)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_residual_gradient_is_added_before_rounding(device, kind, shape, dtype):
    case = Case(kind, shape, (dtype, F32, BF16), device)
    *_, mean, rstd = case.forward(BF16)
    residual = torch.randn(shape).to(dtype)
    dx, *parameters = case.backward(mean, rstd, residual.to(device))
    close(dx, case.dx() + residual.double(), 1e-5, case.dx_terms())
    for got, expected in zip(parameters, case.backward(mean, rstd)[1:], strict=True):
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-3)


@KINDS
@pytest.mark.parametrize("rows", [1, 31, 33, 2000])
def test_parameter_gradients_repeat_bit_for_bit(device, kind, rows):
    case = Case(kind, (rows, 272), (BF16, F32, BF16), device)
    *_, mean, rstd = case.forward(BF16)
    for first, second in zip(case.backward(mean, rstd), case.backward(mean, rstd), strict=True):
        if first is not None:
            assert_bitwise(first, second)


@pytest.mark.parametrize("cols", [64, 65])
def test_infinity(device, cols):
    layer = Case(LAYER_NORM, (2, cols), (F32, F32, F32), device)
    root = Case(RMS_NORM, (2, cols), (F32, F32, F32), device)
    layer.x[0, 3] = root.x[0, 3] = math.inf
    assert bool(layer.forward(F32)[0][0].isnan().all())
    y, *_, rstd = root.forward(F32)
    assert rstd[0].item() == 0 and y[0, 3].isnan() and int(y[0].count_nonzero()) == 1
    assert bool(y[1].isfinite().all())


@KINDS
@pytest.mark.parametrize("cols", [64, 65])
def test_zeros_and_constants(device, kind, cols):
    case = Case(kind, (3, cols), (F32, F32, F32), device)
    case.x.copy_(torch.tensor([[0.0], [3.0], [-(2.0**-140)]]).expand(3, cols))
    check_backward(case, *check_forward(case))


@KINDS
@pytest.mark.parametrize("cols", [64, 65])
def test_no_rows(device, kind, cols):
    case = Case(kind, (0, cols), (BF16, BF16, BF16), device)
    scale, amax = torch.full((1,), 0.75, device=device), torch.ones(1, device=device)
    y, rowwise, columnwise, scales, mean, rstd = case.forward(
        BF16, scale=scale, amax=amax, rowwise=True, columnwise=True
    )
    assert y.shape == rowwise.shape == (0, cols) and columnwise.shape == (cols, 0)
    assert_bitwise(scales, torch.tensor([1 / 0.75, 0.75]))
    assert amax.item() == 1
    dx, dgamma, dbeta = case.backward(mean, rstd)
    assert dx.shape == (0, cols) and int(dgamma.count_nonzero()) == 0
    assert dbeta is None or int(dbeta.count_nonzero()) == 0
    scales = case.forward(BF16, amax=amax, current=True)[3]
    assert_bitwise(scales, torch.ones(2))
    assert amax.item() == 0


@pytest.mark.sanitize
@KINDS
@pytest.mark.parametrize("offset", [1, 2, 4])
def test_unaligned_memory(device, kind, offset):
    case = Case(kind, (32, 64), (BF16, F32, BF16), device)
    aligned = case.forward(BF16, scale=torch.ones(1, device=device), rowwise=True, columnwise=True)
    gradients = case.backward(*aligned[-2:])
    for name in ("x", "gamma", "beta", "dy"):
        if (tensor := getattr(case, name)) is not None:
            room = tensor.new_empty(tensor.numel() + offset)[offset:]
            setattr(case, name, room.view(tensor.shape).copy_(tensor))
    y, rowwise, columnwise, _, mean, rstd = case.forward(
        BF16, scale=torch.ones(1, device=device), rowwise=True, columnwise=True
    )
    close(y, case.y())
    assert_codes_close(rowwise, aligned[1])
    assert_bitwise(columnwise, rowwise.T.contiguous())
    for got, expected in zip(case.backward(mean, rstd), gradients, strict=True):
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-4)


@pytest.mark.sanitize
@KINDS
@pytest.mark.parametrize("shape", [(16, 64), (48, 1032), (5, 7), (16, 4096)], ids=str)
def test_small(device, kind, shape):
    case = Case(kind, shape, (BF16, BF16, BF16), device)
    scale = torch.ones(1, device=device)
    _, rowwise, columnwise, *_ = case.forward(BF16, scale=scale, rowwise=True, columnwise=True)
    assert_bitwise(columnwise, rowwise.T.contiguous())
    case.forward(BF16, current=True)
    check_backward(case, *check_forward(case))


@KINDS
def test_compiled(device, kind):
    case = Case(kind, (32, 64), (BF16, F32, BF16), device)
    residual = torch.randn_like(case.x)

    def step(scale, amax):
        y, rowwise, columnwise, scales, mean, rstd = case.forward(
            BF16, scale=scale, amax=amax, rowwise=True, columnwise=True
        )
        current = case.forward(BF16, current=True)[3]
        grads = [t for t in case.backward(mean, rstd, residual) if t is not None]
        return y, rowwise, columnwise, scales, current, *grads

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    scale, amaxes = torch.full((1,), 3.0, device=device), torch.zeros(2, device=device)
    expected = step(scale, amaxes[:1])
    for got, wanted in zip(compiled(scale, amaxes[1:]), expected, strict=True):
        assert_bitwise(got, wanted)
    assert amaxes[0] == amaxes[1] > 0


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("shape", [(64, 1024), (20, 72)], ids=str)
def test_graph_replay_equals_eager(kind, shape):
    case = Case(kind, shape, (BF16, F32, BF16), "cuda")
    scale, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")

    def call():
        y, *codes, mean, rstd = case.forward(
            BF16, scale=scale, amax=amax, rowwise=True, columnwise=True
        )
        current = case.forward(BF16, current=True)[3]
        return y, *codes, mean, rstd, current, *case.backward(mean, rstd)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    case.x.mul_(3.0)
    case.dy.add_(1.0)
    scale.fill_(2.0)
    graph.replay()
    for got, expected in zip(captured, call(), strict=True):
        if expected is not None:
            assert_bitwise(got, expected)


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("shape", [(8192, 768), (5000, 4096), (1024, 12288), (300, 8192)], ids=str)
@pytest.mark.parametrize("dtypes", [(BF16, BF16, BF16), (F32, F32, BF16)], ids=str)
def test_large_on_gpu(kind, shape, dtypes):
    """There are more rows than blocks on the GPU, so all loops over rows run several times."""
    case = Case(kind, shape, dtypes, "cuda")
    check_backward(case, *check_forward(case))
    value = case.forward(F32)[0]
    scale, amax = torch.full((1,), 20.0, device="cuda"), torch.zeros(1, device="cuda")
    _, rowwise, columnwise, *_ = case.forward(
        None, scale=scale, amax=amax, rowwise=True, columnwise=True
    )
    assert_codes_close(rowwise, fp8.encode(value, fp8.E4M3, 20.0))
    assert_bitwise(columnwise, rowwise.T.contiguous())
    torch.testing.assert_close(amax[0], value.abs().max(), rtol=4e-6, atol=0)


@pytest.mark.gpu
@KINDS
def test_more_than_2_to_the_31_elements(kind):
    rows, cols = 2**19 + 64, 4096
    x = torch.zeros(rows, cols, dtype=BF16, device="cuda")
    small = Case(kind, (64, cols), (BF16, BF16, BF16), "cuda")
    case = Case(kind, (1, cols), (BF16, BF16, BF16), "cuda")
    case.gamma, case.beta = small.gamma, small.beta
    x[-64:] = small.x
    case.x = x
    scale = torch.ones(1, device="cuda")
    arguments = {"scale": scale, "rowwise": True, "columnwise": True}
    got, expected = case.forward(None, **arguments), small.forward(None, **arguments)
    assert_codes_close(got[1][-64:], expected[1])
    assert_codes_close(got[2][:, -64:], expected[2])
    y = case.forward(BF16)[0]
    same(y[-64:], small.forward(BF16)[0])
    del y
    case.dy = torch.zeros_like(x)
    case.dy[-64:] = small.dy
    dx, dgamma, _ = case.backward(*got[-2:])
    small_dx, small_dgamma, _ = small.backward(*expected[-2:])
    torch.testing.assert_close(dx[-64:], small_dx, rtol=1e-2, atol=1e-4)
    torch.testing.assert_close(dgamma, small_dgamma, rtol=1e-2, atol=1e-3)
