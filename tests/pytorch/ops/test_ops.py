"""Operations against torch, and a sequence of operations against the fused module."""

import copy

import pytest
import torch
from rulers import assert_bitwise
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch import ops

PLAIN = {
    "GELU": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "QGELU": lambda x: x * torch.sigmoid(1.702 * x),
    "ReLU": nn.functional.relu,
    "SReLU": lambda x: nn.functional.relu(x).square(),
    "SiLU": nn.functional.silu,
}
GATED = {"GEGLU": "GELU", "QGEGLU": "QGELU", "ReGLU": "ReLU", "SReGLU": "SReLU", "SwiGLU": "SiLU"}


def defined(name: str, x: torch.Tensor) -> torch.Tensor:
    if name in PLAIN:
        return PLAIN[name](x)
    gate, linear = x.chunk(2, dim=-1)
    if name == "ClampedSwiGLU":
        gate = gate.clamp(max=7)
        return PLAIN["QGELU"](gate) * (linear.clamp(-7, 7) + 1)
    return PLAIN[GATED[name]](gate) * linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*PLAIN, *GATED, "ClampedSwiGLU"])
def test_activations(name: str, dtype: torch.dtype, device: str) -> None:
    module = getattr(ops, name)(cache_quantized_input=False)
    x = torch.randn(3, 5, 32).to(dtype)
    leaf = x.to(device, copy=True).requires_grad_()
    exact = x.double().requires_grad_()
    out, expected = module(leaf), defined(name, exact)
    assert out.dtype is dtype and out.shape == expected.shape
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(out.double().cpu(), expected, rtol=bound, atol=bound)
    upstream = torch.randn(expected.shape).to(dtype)
    out.backward(upstream.to(device))
    expected.backward(upstream.double())
    torch.testing.assert_close(leaf.grad.double().cpu(), exact.grad, rtol=bound, atol=bound)
    with torch.no_grad():
        assert_bitwise(copy.deepcopy(module)(leaf), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_glu_computes_in_fp32_and_rounds_once(dtype: torch.dtype, device: str) -> None:
    """Gates have gradients even if their sigmoid rounds to 1 in 16 bits."""
    gate = torch.linspace(-10, 10, 41)
    x = torch.stack([gate, torch.full_like(gate, 3.0)], 1).to(dtype)
    leaf, exact = (y.to(device, copy=True).requires_grad_() for y in (x, x.double()))
    out, expected = ops.GLU()(leaf), exact[:, :1].sigmoid() * exact[:, 1:]
    for y in (out, expected):
        y.backward(torch.ones_like(y))
    bounds = {"rtol": torch.finfo(dtype).eps, "atol": torch.finfo(dtype).tiny * 2**-10}
    for one, other in ((out, expected), (leaf.grad, exact.grad)):
        assert one.dtype is dtype
        torch.testing.assert_close(one.double(), other, **bounds)


@pytest.mark.parametrize("make", [lambda device: ops.GELU(), lambda d: ops.Bias(16, device=d)])
def test_dtype_of_autocast(device: str, make) -> None:
    x = torch.randn(4, 16, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        out = make(device)(x)
    assert out.dtype is torch.bfloat16
    out.sum().backward()
    assert x.grad.dtype is torch.float32


def test_basic_linear_is_a_linear_without_bias(device: str) -> None:
    torch.manual_seed(0)
    module = ops.BasicLinear(32, 48, device=device)
    assert isinstance(module, ops.FusibleOperation) and isinstance(module, te.Linear)
    assert list(module.state_dict()) == ["weight", "_extra_state"]
    bound = 1 / 32**0.5
    assert 0.9 * bound < module.weight.abs().max().item() <= bound  # initialised as in `nn.Linear`
    reference = te.Linear(32, 48, bias=False, device=device)
    reference.load_state_dict(module.state_dict())
    x = torch.randn(16, 32, device=device)
    with te.fp8_autocast():
        assert_bitwise(module(x), reference(x))


def test_weights_may_be_assigned(device: str) -> None:
    """Megatron makes operations on the meta device and assigns the parameters of a module."""
    linear = te.Linear(32, 48, device=device)
    sequence = ops.Sequential(
        ops.BasicLinear(32, 48, device="meta", dtype=torch.float32),
        ops.Bias(48, device="meta", dtype=torch.float32),
    )
    sequence[0].weight, sequence[1].bias = linear.weight, linear.bias
    nn.init.normal_(linear.bias)
    x = torch.randn(16, 32, device=device)
    torch.testing.assert_close(sequence(x), linear(x))
    sequence(x).sum().backward()
    assert linear.weight.grad is not None and linear.bias.grad is not None


def test_a_sequence_is_the_fused_module(device: str) -> None:
    """Under current scaling, the fused module also rounds norms and activations to their dtype."""
    fused = te.LayerNormMLP(32, 64, activation="swiglu", device=device)
    sequence = ops.Sequential(
        ops.LayerNorm(32, eps=1e-5, device=device),
        ops.BasicLinear(32, 128, device=device),
        ops.Bias(128, device=device),
        ops.SwiGLU(),
    )
    sequence.append(ops.BasicLinear(64, 32, device=device))
    sequence.append(ops.Bias(32, device=device))
    names = ["0.weight", "0.bias", "1.weight", "2.bias", "4.weight", "5.bias"]
    assert [name for name, _ in sequence.named_parameters()] == names
    with torch.no_grad():
        pairs = zip(sequence.parameters(), fused.parameters(), strict=True)
        for target, source in pairs:
            target.copy_(source)
    x = torch.randn(16, 32, device=device)
    for fp8 in (False, True):
        with te.fp8_autocast(enabled=fp8, fp8_recipe=Float8CurrentScaling()):
            torch.testing.assert_close(sequence(x), fused(x), rtol=1e-3, atol=1e-4)


def test_refusals() -> None:
    with pytest.raises(NotImplementedError, match="cache_quantized_input=True"):
        ops.GELU(cache_quantized_input=True)
    with pytest.raises(ValueError, match=r"\[SwiGLU\] expected x of shape \(\.\.\., even\)"):
        ops.SwiGLU()(torch.ones(4, 3))
    with pytest.raises(ValueError, match=r"\[Bias\] expected x of shape \(\.\.\., 16\)"):
        ops.Bias(16, device="cpu")(torch.ones(4, 8))
