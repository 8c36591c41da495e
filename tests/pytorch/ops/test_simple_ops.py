"""Simple operations against torch in fp64: results, gradients, dtypes and errors."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from rulers import assert_bitwise
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch import ops

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def unit_length(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def gated(x: torch.Tensor) -> torch.Tensor:
    gate, linear = x.chunk(2, dim=-1)
    return gate.sigmoid() * linear


SIMPLE: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Tensor], torch.Tensor]]] = {
    "Identity": (ops.Identity, lambda x: x),
    "Reshape": (lambda: ops.Reshape([5, -1]), lambda x: x.reshape(5, 96)),
    "ConstantScale": (lambda: ops.ConstantScale(-0.3), lambda x: -0.3 * x),
    "Dropout": (lambda: ops.Dropout(0.5).eval(), lambda x: x),
    "L2Normalization": (ops.L2Normalization, unit_length),
    "GLU": (ops.GLU, gated),
}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", SIMPLE)
def test_definition(name: str, dtype: torch.dtype, device: str) -> None:
    make, defined = SIMPLE[name]
    module = make()
    assert isinstance(module, ops.FusibleOperation)
    assert not list(module.parameters()) and not module.state_dict()
    x = torch.randn(3, 5, 32).to(dtype)
    leaf = x.to(device, copy=True).requires_grad_()
    exact = x.double().requires_grad_()
    out, expected = module(leaf), defined(exact)
    assert out.dtype is dtype and out.shape == expected.shape
    bound = BOUNDS[dtype]
    torch.testing.assert_close(out.double().cpu(), expected, rtol=bound, atol=bound)
    upstream = torch.randn(expected.shape).to(dtype)
    out.backward(upstream.to(device))
    expected.backward(upstream.double())
    assert leaf.grad is not None and leaf.grad.dtype is dtype
    torch.testing.assert_close(leaf.grad.double().cpu(), exact.grad, rtol=bound, atol=bound)
    with torch.no_grad():
        assert_bitwise(copy.deepcopy(module)(leaf), out)


def test_dropout_keeps_the_mean(device: str) -> None:
    torch.manual_seed(0)
    module = ops.Dropout(0.25)
    x = torch.ones(1000, 16, device=device, requires_grad=True)
    out = module(x)
    passed = out != 0
    assert torch.equal(out[passed], torch.full_like(out[passed], 1 / 0.75))
    assert abs(passed.float().mean().item() - 0.75) < 0.02
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


def test_length_of_vectors_of_several_sizes(device: str) -> None:
    module = ops.L2Normalization(eps=0.5, seq_length=4, micro_batch_size=2)
    for size in (8, 3, 8):
        x = torch.randn(2, size, device=device)
        expected = x / (x.square().sum(-1, keepdim=True) + 0.5).sqrt()
        torch.testing.assert_close(module(x), expected)


def clamped(gate: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=1.0)
    return gate * (1.5 * gate).sigmoid() * (linear.clamp(-1.0, 1.0) + 0.5)


# Class, arguments, class without scales, definition of two halves.
SCALED = {
    "ScaledSwiGLU": (ops.ScaledSwiGLU, {}, ops.SwiGLU, lambda a, b: nn.functional.silu(a) * b),
    "ScaledClampedQGeGLU": (
        ops.ScaledClampedQGeGLU,
        {"limit": 1.0, "alpha": 1.5, "glu_linear_offset": 0.5},
        ops.ClampedSwiGLU,
        clamped,
    ),
}


@pytest.mark.parametrize("block", [None, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SCALED)
def test_scaled_gates(name: str, dtype: torch.dtype, block: int | None, device: str) -> None:
    kind, arguments, unscaled_kind, defined = SCALED[name]
    module = kind(glu_interleave_size=block, **arguments)
    x, scales = torch.randn(3, 5, 32).to(dtype), torch.rand(3, 5)
    exact = [one.double().requires_grad_() for one in (x, scales)]
    blocks = exact[0].unflatten(-1, (-1, 2, block or 16))
    gate, linear = blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)
    expected = defined(gate, linear) * exact[1][..., None]
    unscaled = unscaled_kind(glu_interleave_size=block, **arguments)
    check_scaled(module, unscaled, (x, scales), exact, expected, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scaled_srelu(dtype: torch.dtype, device: str) -> None:
    x, scales = torch.randn(3, 5, 32).to(dtype), torch.rand(3, 5)
    exact = [one.double().requires_grad_() for one in (x, scales)]
    expected = exact[0].relu().square() * exact[1][..., None]
    check_scaled(ops.ScaledSReLU(), ops.SReLU(), (x, scales), exact, expected, device)


def check_scaled(module, unscaled, inputs, exact, expected, device: str) -> None:
    """Compare results and gradients with exact ones, and with scales of 1 the unscaled module."""
    leaves = [one.to(device, copy=True).requires_grad_() for one in inputs]
    dtype = inputs[0].dtype
    out = module(*leaves)
    assert out.dtype is dtype
    bound = 2 * BOUNDS[dtype]
    torch.testing.assert_close(out.double().cpu(), expected, rtol=bound, atol=bound)
    upstream = torch.randn(expected.shape).to(dtype)
    with torch.no_grad():
        assert_bitwise(module(leaves[0], torch.ones_like(leaves[1])), unscaled(leaves[0]))
    out.backward(upstream.to(device))
    expected.backward(upstream.double())
    for leaf, other in zip(leaves, exact, strict=True):
        torch.testing.assert_close(leaf.grad.double().cpu(), other.grad, rtol=bound, atol=4 * bound)


def test_scales_in_a_sequence(device: str) -> None:
    """An expert of a mixture: the scales are an extra input of the sequence."""
    x, scales = torch.randn(16, 32, device=device), torch.rand(16, device=device)
    for op in (ops.ScaledSReLU(), ops.ScaledClampedQGeGLU(glu_interleave_size=8)):
        linear = ops.Linear(32, 32, device=device)
        assert_bitwise(ops.Sequential(linear, op)(x, scales), op(linear(x), scales))


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias: bool, device: str) -> None:
    """The weight starts like torch's, the bias with zeros; the results are those of `te.Linear`."""
    torch.manual_seed(0)
    module = ops.Linear(32, 48, bias=bias, device=device)
    assert isinstance(module, ops.FusibleOperation)
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"][: 1 + bias]
    assert 0.9 < module.weight.abs().max().item() * math.sqrt(32) <= 1
    if bias:
        assert not module.bias.any()
        nn.init.normal_(module.bias)
    else:
        assert module.bias is None
    reference = te.Linear(32, 48, bias=bias, device=device)
    reference.load_state_dict(module.state_dict())
    x = torch.randn(16, 32, device=device, requires_grad=True)
    assert_bitwise(module(x), reference(x))
    with te.fp8_autocast(fp8_recipe=Float8CurrentScaling()):
        found = [torch.autograd.grad(m(x).sum(), [x, *m.parameters()]) for m in (module, reference)]
    for one, other in zip(*found, strict=True):
        assert_bitwise(one, other)


@pytest.mark.parametrize("kind", [ops.Linear, ops.BasicLinear])
def test_weights_in_fp8_alone(kind: type[ops.Linear], device: str) -> None:
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        module = kind(32, 48, device=device)
    assert isinstance(module.weight, te.Float8Tensor)
    plain = kind(32, 48, device=device)
    plain.load_state_dict(module.state_dict())
    x = torch.randn(16, 32, device=device)
    with te.autocast(recipe=Float8CurrentScaling()):
        torch.testing.assert_close(module(x), plain(x), rtol=1e-2, atol=1e-2)


def test_linear_is_its_two_parts(device: str) -> None:
    whole = ops.Linear(32, 48, device=device)
    parts = ops.Sequential(ops.BasicLinear(32, 48, device=device), ops.Bias(48, device=device))
    nn.init.normal_(whole.bias)
    with torch.no_grad():
        for target, source in zip(parts.parameters(), whole.parameters(), strict=True):
            target.copy_(source)
    x = torch.randn(8, 32, device=device)
    torch.testing.assert_close(parts(x), whole(x))


def test_weights_of_a_linear_may_be_assigned(device: str) -> None:
    """Programs build operations on the meta device and assign weights; a missing bias is None."""
    other = te.Linear(32, 48, bias=False, device=device)
    module = ops.Linear(32, 48, bias=False, device="meta", dtype=torch.float32)
    module.weight, module.bias = other.weight, None
    x = torch.randn(4, 32, device=device)
    assert_bitwise(module(x), other(x))


@pytest.mark.parametrize(
    ("run", "error", "text"),
    [
        (lambda: ops.Reshape([2, 0.5]), TypeError, r"\[Reshape\] expected shape to be ints"),
        (lambda: ops.Reshape([7])(torch.ones(2)), ValueError, r"\[Reshape\].* got \(2,\)"),
        (lambda: ops.Reshape(7), TypeError, r"\[Reshape\] expected shape to be ints, got 7"),
        *(
            (
                lambda op=op: op(torch.ones(2, dtype=torch.int32)),
                TypeError,
                rf"\[{type(op).__name__}\] expected x of floating point, got torch.int32",
            )
            for op in (ops.Bias(2, device="cpu"), ops.ConstantScale(0.5), ops.Dropout(0.5))
        ),
        (
            lambda: ops.AddExtraInput()(torch.ones(2).long(), torch.ones(2)),
            TypeError,
            r"\[AddExtraInput\] expected x of floating point, got torch.int64",
        ),
        (
            lambda: ops.AddExtraInput(in_place=True)(torch.ones(2), torch.ones(2).long()),
            TypeError,
            r"\[AddExtraInput\] expected extra of floating point, got torch.int64",
        ),
        (lambda: ops.ConstantScale("2"), TypeError, r"\[ConstantScale\] expected scale"),
        (lambda: ops.ConstantScale(2)(None), TypeError, r"\[ConstantScale\] expected x to be a"),
        (lambda: ops.Dropout(1.0), ValueError, r"\[Dropout\] expected 0 <= p < 1, got 1.0"),
        (lambda: ops.GLU()(torch.ones(2, 3)), ValueError, r"\[GLU\] expected x of shape"),
        (lambda: ops.GLU(cache_quantized_input=True), NotImplementedError, r"\[GLU\] cache"),
        (lambda: ops.L2Normalization()(torch.ones(())), ValueError, r"\[L2Normalization\]"),
        (lambda: ops.L2Normalization()(torch.ones(2, 0)), ValueError, r"\[L2Normalization\]"),
        (
            lambda: ops.ScaledSwiGLU()(torch.ones(2, 4), torch.ones(2, 1)),
            ValueError,
            r"\[ScaledSwiGLU\] expected scales of shape \(2,\), one for each row, got \(2, 1\)",
        ),
        (
            lambda: ops.ScaledSwiGLU(glu_interleave_size=4)(torch.ones(2, 12), torch.ones(2)),
            ValueError,
            r"\[ScaledSwiGLU\] expected a last size divisible by 8",
        ),
        (
            lambda: ops.ScaledSwiGLU()(torch.ones(2, 4), [1.0, 1.0]),
            TypeError,
            r"\[ScaledSwiGLU\] expected scales to be a torch.Tensor, got list",
        ),
        (
            lambda: ops.SwiGLU(glu_interleave_size=4)(torch.ones(())),
            ValueError,
            r"\[SwiGLU\] expected x of shape",
        ),
        (lambda: ops.ScaledSwiGLU(glu_interleave_size=0), ValueError, "glu_interleave_size >= 1"),
        (lambda: ops.ScaledClampedQGeGLU(limit=0.0), ValueError, r"\[ScaledClampedQGeGLU\]"),
        (lambda: ops.ClampedSwiGLU(glu_interleave_size=0), ValueError, "glu_interleave_size >= 1"),
        (
            lambda: ops.ScaledSReLU()(torch.ones(2, 4), torch.ones(4)),
            ValueError,
            r"\[ScaledSReLU\] expected scales of shape \(2,\), one for each row, got \(4,\)",
        ),
    ],
)
def test_refusals(run: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        run()


@pytest.mark.parametrize("make", [ops.GELU, ops.SwiGLU, lambda: te.Linear(32, 32)])
def test_gradients_of_gradients_are_an_error_in_words(make, device: str) -> None:
    """The second backward raises the error; the first one may keep its graph."""
    x = torch.randn(16, 32, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(make().to(device)(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gradients of gradients are not supported"):
        grad.sum().backward()
