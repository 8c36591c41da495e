"""dropout_add on both backends: compared with its definition bit by bit."""

import pytest
import torch
from cases import dropout_add as cases
from rulers import assert_bitwise, assert_sum_close

from transformer_engine import _C
from transformer_engine.pytorch.kernels.dropout_add import (
    dropout_add_backward,
    dropout_add_forward,
)

SEED = -(2**62) + 12345678912345
P = 0.3


def seed_on(device, value=SEED):
    return torch.tensor([value], device=device)


def run_forward(device, x, bias, residual, p=P):
    tensors = [None if t is None else t.to(device) for t in (x, bias, residual)]
    return dropout_add_forward(*tensors, seed_on(device), p)


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("residual_dtype", cases.DTYPES, ids=str)
def test_forward(device, shape, dtype, residual_dtype):
    x, bias = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    residual = torch.randn(shape).to(residual_dtype)
    out = run_forward(device, x, bias, residual)
    assert_bitwise(out, cases.forward(x, bias, residual, cases.dropout_mask(shape, SEED, P), P))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("shape", [(16, 64), (5, 33)], ids=str)
def test_every_set_of_inputs(device, with_bias, with_residual, p, shape):
    x = torch.randn(shape).bfloat16()
    bias = torch.randn(shape[-1]).bfloat16() if with_bias else None
    residual = torch.randn(shape) if with_residual else None
    out = run_forward(device, x, bias, residual, p)
    assert_bitwise(out, cases.forward(x, bias, residual, cases.dropout_mask(shape, SEED, p), p))


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("dx_dtype", [*cases.DTYPES, None], ids=str)
@pytest.mark.parametrize("dbias_dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_backward(device, shape, dtype, dx_dtype, dbias_dtype):
    dout = torch.randn(shape).to(dtype)
    dx, dbias = dropout_add_backward(dout.to(device), seed_on(device), P, dx_dtype, dbias_dtype)
    exact = cases.gradient(dout, cases.dropout_mask(shape, SEED, P), P)
    if dx_dtype is None:
        assert dx is None
    else:
        assert_bitwise(dx, exact.to(dx_dtype))
    if dbias_dtype is None:
        assert dbias is None
    else:
        assert dbias.dtype == dbias_dtype
        assert_sum_close(dbias, exact.unsqueeze(0).flatten(0, -2))


@pytest.mark.parametrize("p", [0.0, 0.999])
@pytest.mark.parametrize("shape", [(300, 24), (5, 33)], ids=str)
def test_backward_probabilities(device, p, shape):
    dout = torch.randn(shape).bfloat16()
    seed = None if p == 0 else seed_on(device)
    dx, dbias = dropout_add_backward(dout.to(device), seed, p, torch.bfloat16, torch.float32)
    exact = cases.gradient(dout, cases.dropout_mask(shape, SEED, p), p)
    assert_bitwise(dx, exact.bfloat16())
    assert_sum_close(dbias, exact)


def test_without_dropout_no_seed_is_needed(device):
    x, residual = torch.randn(4, 8).bfloat16(), torch.randn(4, 8)
    out = dropout_add_forward(x.to(device), None, residual.to(device), None, 0.0)
    assert_bitwise(out, x.float() + residual)


def test_not_a_number_and_infinity(device):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e38, 1e-42, 0.0, -0.0]).repeat(40)
    residual = torch.linspace(-1, 1, len(x))
    keep = cases.dropout_mask(x.shape, SEED, 0.5)
    out = run_forward(device, x, None, residual, 0.5)
    assert_bitwise(out, cases.forward(x, None, residual, keep, 0.5))
    assert_bitwise(out.cpu()[~keep], residual[~keep])


def test_share_of_dropped_elements_and_their_independence(device):
    """Among half a million elements, shares are within five standard deviations of expectation."""
    x = torch.ones(512, 1024, device=device)
    first = dropout_add_forward(x, None, None, seed_on(device, 1), 0.25) != 0
    second = dropout_add_forward(x, None, None, seed_on(device, 2), 0.25) != 0
    deviation = (0.25 * 0.75 / x.numel()) ** 0.5
    assert abs(first.double().mean().item() - 0.75) < 5 * deviation
    together = (first & second).double().mean().item()
    assert abs(together - 0.75**2) < 5 * (0.75**2 * (1 - 0.75**2) / x.numel()) ** 0.5


@pytest.mark.parametrize("shape", cases.EMPTY_SHAPES, ids=str)
def test_empty(device, shape):
    x, bias = torch.empty(shape, device=device), torch.empty(shape[-1], device=device)
    assert dropout_add_forward(x, bias, x, seed_on(device), P).shape == shape
    dx, dbias = dropout_add_backward(x, seed_on(device), P, torch.float32, torch.float32)
    assert dx.shape == shape
    assert_bitwise(dbias, torch.zeros(shape[-1]))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_unaligned_memory(device, dtype):
    """Views that begin at the second element of their storage allow no 16-byte access."""
    shape, count = (40, 64), 40 * 64
    x, residual = torch.randn(1 + count).to(dtype), torch.randn(1 + count).to(dtype)
    bias = torch.randn(65).to(dtype)
    views = [x.to(device)[1:].view(shape), bias.to(device)[1:], residual.to(device)[1:].view(shape)]
    keep = cases.dropout_mask(shape, SEED, P)
    out = dropout_add_forward(*views, seed_on(device), P)
    cpu_views = [x[1:].view(shape), bias[1:], residual[1:].view(shape)]
    assert_bitwise(out, cases.forward(*cpu_views, keep, P))
    dx, dbias = dropout_add_backward(views[0], seed_on(device), P, dtype, torch.float32)
    exact = cases.gradient(cpu_views[0], keep, P)
    assert_bitwise(dx, exact.to(dtype))
    assert_sum_close(dbias, exact)


def test_in_place_on_the_residual(device):
    x, residual = torch.randn(8, 40), torch.randn(8, 40)
    expected = run_forward(device, x, None, residual)
    into = residual.to(device)
    _C.dropout_add_forward(x.to(device), None, into, seed_on(device), P, into)
    assert_bitwise(into, expected)


def bad(**changes):
    """Arguments of a valid call of `_C.dropout_add_forward`, with `changes`."""
    x = torch.zeros(4, 8)
    good = {"x": x, "bias": None, "residual": None, "seed": seed_on("cpu"), "p": P}
    return {**good, "out": torch.zeros(4, 8), **changes}


ERRORS = {
    "dtype": ({"x": torch.zeros(4, 8).double()}, TypeError, "float32, float16 or bfloat16 for x"),
    "strides": ({"x": torch.zeros(8, 4).T}, ValueError, "expected x to be contiguous"),
    "bias size": ({"bias": torch.zeros(7)}, ValueError, "expected 8 elements for the bias"),
    "bias dtype": ({"bias": torch.zeros(8).half()}, TypeError, "expected float32 for the bias"),
    "residual": ({"residual": torch.zeros(4, 7)}, ValueError, r"\(4, 8\) for the residual"),
    "residual dtype": (
        {"residual": torch.zeros(4, 8).half()},
        TypeError,
        "expected float32 for the residual, got float16",
    ),
    "out": ({"out": torch.zeros(3, 8)}, ValueError, r"\(4, 8\) for out, got \(3, 8\)"),
    "no seed": ({"seed": None}, ValueError, "expected a tensor for the seed, got none"),
    "seed dtype": ({"seed": torch.zeros(1)}, TypeError, "expected int64 for the seed"),
    "seed size": ({"seed": torch.zeros(2).long()}, ValueError, "1 element for the seed"),
    "p of one": ({"p": 1.0}, ValueError, "probability 0 <= p < 1, got 1"),
    "negative p": ({"p": -0.1}, ValueError, "probability 0 <= p < 1, got -0.1"),
    "p is NaN": ({"p": float("nan")}, ValueError, "probability 0 <= p < 1, got nan"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input(name):
    changes, kind, message = ERRORS[name]
    with pytest.raises(kind, match=rf"\[dropout_add_forward\] .*{message}"):
        _C.dropout_add_forward(**bad(**changes))


def test_bad_gradient():
    dout = torch.zeros(4, 8)
    with pytest.raises(
        ValueError, match=r"\[dropout_add_backward\] expected an output dx or dbias"
    ):
        _C.dropout_add_backward(dout, seed_on("cpu"), P)
    with pytest.raises(ValueError, match="expected 8 elements for dbias"):
        _C.dropout_add_backward(dout, seed_on("cpu"), P, None, torch.zeros(7))
    with pytest.raises(ValueError, match=r"expected shape \(4, 8\) for dx"):
        _C.dropout_add_backward(dout, seed_on("cpu"), P, torch.zeros(8, 4))
    with pytest.raises(ValueError, match="probability"):
        dropout_add_backward(dout, seed_on("cpu"), 1.0, torch.float32, None)


def test_compiles(device):
    x, bias, residual = (torch.randn(s, device=device) for s in [(4, 8), (8,), (4, 8)])

    def both(x, bias, residual, seed):
        out = dropout_add_forward(x, bias, residual, seed, P)
        return out, *dropout_add_backward(out, seed, P, torch.bfloat16, None)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    arguments = (x, bias, residual, seed_on(device))
    for ours, expected in zip(compiled(*arguments), both(*arguments), strict=True):
        assert ours is expected is None or assert_bitwise(ours, expected) is None


@pytest.mark.sanitize
@pytest.mark.parametrize("shape", cases.SANITIZE_SHAPES, ids=str)
def test_small_for_the_sanitizer(device, shape):
    x, bias = torch.randn(shape).bfloat16(), torch.randn(shape[-1]).bfloat16()
    keep = cases.dropout_mask(shape, SEED, P)
    out = run_forward(device, x, bias, x)
    assert_bitwise(out, cases.forward(x, bias, x, keep, P))
    dx, dbias = dropout_add_backward(x.to(device), seed_on(device), P, x.dtype, x.dtype)
    exact = cases.gradient(x, keep, P)
    assert_bitwise(dx, exact.to(x.dtype))
    assert_sum_close(dbias, exact)


@pytest.mark.gpu
def test_replays_in_a_graph_with_a_new_seed():
    shape = (64, 256)
    x, residual = (torch.randn(shape).bfloat16() for _ in range(2))
    x_gpu, residual_gpu, seed = x.cuda(), residual.cuda(), seed_on("cuda")

    def both():
        out = dropout_add_forward(x_gpu, None, residual_gpu, seed, P)
        return out, *dropout_add_backward(x_gpu, seed, P, torch.bfloat16, torch.float32)

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dx, dbias = both()
    for value in (3, 4):
        seed.fill_(value)
        graph.replay()
        keep = cases.dropout_mask(shape, value, P)
        exact = cases.gradient(x, keep, P)
        assert_bitwise(out, cases.forward(x, None, residual, keep, P))
        assert_bitwise(dx, exact.bfloat16())
        assert_sum_close(dbias, exact)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """The last elements of a long tensor use the random bits of their own indices."""
    cols, rows = 4096, 2**19 + 8
    x = torch.ones(rows, cols, device="cuda", dtype=torch.bfloat16)
    out = dropout_add_forward(x, None, None, seed_on("cuda"), P)
    dx, dbias = dropout_add_backward(x, seed_on("cuda"), P, torch.bfloat16, torch.float32)
    assert torch.equal(dx, out)
    index = rows * cols - 8
    stays = [bits >= cases.threshold(P) for bits in cases.dropout_bits(index, 8, SEED)]
    assert [value != 0 for value in out[-1, -8:].tolist()] == stays
    share = (out != 0).sum(0, dtype=torch.float32) / (1 - P)
    torch.testing.assert_close(dbias, share, rtol=1e-4, atol=0)
