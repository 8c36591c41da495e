"""`Quantize`: the casts of each recipe, their gradients, scaling state and recomputes."""

import copy
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch import ops
from transformer_engine.pytorch.tensor import QuantizedTensor

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
KINDS = {
    "delayed": te.Float8Tensor,
    "current": te.Float8Tensor,
    "block": te.Float8BlockwiseQTensor,
}


def cast(name: str, x: torch.Tensor, gradient: bool) -> torch.Tensor:
    """The values of `x` after the first cast under a recipe."""
    format = te.DType.kFloat8E4M3
    if gradient and name != "block":
        format = te.DType.kFloat8E5M2
    one = torch.ones(1, device=x.device)
    if name == "delayed":
        quantizer: Any = te.Float8Quantizer(one, one.clone(), format)
    elif name == "current":
        quantizer = te.Float8CurrentScalingQuantizer(format)
    else:
        quantizer = te.Float8BlockQuantizer(
            format, rowwise=True, columnwise=False, block_scaling_dim=1
        )
    return quantizer(x).dequantize()


@pytest.mark.parametrize("shape", [(16, 32), (2, 3, 128), (5, 24)], ids=str)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_casts(name: str, forward: bool, backward: bool, shape: tuple[int, ...], device: str):
    module = ops.Quantize(forward=forward, backward=backward)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    with te.autocast(recipe=RECIPES[name]):
        out = module(x)
    assert out.shape == x.shape and out.dtype is x.dtype and out.requires_grad
    if forward:
        assert isinstance(out, KINDS[name])
        assert_bitwise(out.dequantize(), cast(name, x.detach(), False))
    else:
        assert type(out) is torch.Tensor
        assert_bitwise(out, x)
    grad = torch.randn_like(x)
    out.backward(grad)
    assert type(x.grad) is torch.Tensor
    assert_bitwise(x.grad, cast(name, grad, True) if backward else grad)


def test_outside_of_an_autocast_it_is_the_identity(device: str) -> None:
    module, x = ops.Quantize(backward=True), torch.randn(4, 8, device=device)
    assert module(x) is x
    with te.autocast(enabled=False, recipe=Float8CurrentScaling()):
        assert module(x) is x
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        codes = module(x)
        assert isinstance(codes, QuantizedTensor)
        assert_bitwise(module(codes).dequantize(), codes.dequantize())


@pytest.mark.parametrize("name", RECIPES)
def test_operations_behind_it_read_the_values_of_the_codes(name: str, device: str) -> None:
    """This is the documented way to share a cast among sequences.

    The second cast changes no value, except under delayed scaling, where it has its own scale.
    """
    torch.manual_seed(0)
    norm = ops.Sequential(
        ops.RMSNorm(128, device=device), ops.Quantize(), ops.Identity(), ops.Reshape((2, 8, 128))
    )
    linear = ops.Sequential(ops.Linear(128, 32, device=device))
    plain = copy.deepcopy(linear)
    x = torch.randn(16, 128, device=device, requires_grad=True)
    with te.autocast(recipe=RECIPES[name]):
        codes = norm(x)
        assert isinstance(codes, QuantizedTensor)
        out = linear(codes)
        expected = plain(codes.dequantize())
        uncast = plain(norm[0](x).view(2, 8, 128))
    assert_bitwise(out, expected)
    if name != "delayed":
        torch.testing.assert_close(out, uncast, rtol=1e-5, atol=1e-5)
    (found,) = torch.autograd.grad(out.sum(), x)
    assert found.isfinite().all() and found.any()


def test_delayed_scaling_follows_the_tensor_and_its_gradient(device: str) -> None:
    module = ops.Quantize(backward=True)
    for factor in (1.0, 100.0):
        x = (factor * torch.ones(2, 16, device=device)).requires_grad_()
        with te.autocast(recipe=DelayedScaling(amax_history_len=1)):
            out = module(x)
        out.backward(torch.full_like(x, 2 * factor))
    assert module.scaling["forward"].scale[0].item() == pytest.approx(448 / 100)
    assert module.scaling["backward"].scale[0].item() == pytest.approx(57344 / 200)
    other = ops.Quantize()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.scaling["forward"].scale, module.scaling["forward"].scale.cpu())
    with torch.no_grad(), te.autocast(recipe=DelayedScaling(amax_history_len=1)):
        module(1e4 * x)  # evaluation does not change the scale
    assert module.scaling["forward"].scale[0].item() == pytest.approx(448 / 100)


def test_calibration(device: str) -> None:
    module, x = ops.Quantize(), torch.full((2, 16), 7.0, device=device)
    with te.autocast(enabled=False, calibrating=True, recipe=DelayedScaling(amax_history_len=1)):
        assert torch.equal(module(x), x)
    assert module.scaling["forward"].scale[0].item() == pytest.approx(64.0)


def reentrant(function, x):
    return torch.utils.checkpoint.checkpoint(function, x, use_reentrant=True)


def saved_tensors(function, x):
    return torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)


@pytest.mark.parametrize("checkpoint", [te.checkpoint, reentrant, saved_tensors])
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_recomputes_change_no_bit(name: str, checkpoint, device: str) -> None:
    def run(call) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = ops.Sequential(
            ops.LayerNorm(32, device=device),
            ops.Quantize(backward=True),
            ops.Linear(32, 64, device=device),
            ops.GELU(),
        )
        x, found = torch.randn(16, 32, device=device, requires_grad=True), []
        for _ in range(3):
            with te.autocast(recipe=RECIPES[name]):
                out = call(model, x)
            out.square().sum().backward()
            found += [out.detach(), x.grad.clone(), model[2].weight.grad.clone()]
        states = [state for m in model for state in getattr(m, "scaling", {}).values()]
        return [*found, *[state.scale for state in states]]

    for one, other in zip(run(checkpoint), run(lambda f, x: f(x)), strict=True):
        assert_bitwise(one, other)


# torch gives this warning at graph breaks.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", ["delayed", "block"])
def test_compiled_code_reads_the_same_values(name: str) -> None:
    def run(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = ops.Sequential(
            ops.LayerNorm(32, device="cpu"), ops.Quantize(backward=True), ops.GELU()
        )
        call = torch.compile(model, backend="aot_eager") if compiled else model
        found = []
        for _ in range(3):
            x = torch.randn(16, 32, requires_grad=True)
            with te.autocast(recipe=RECIPES[name]):
                out = call(x)
            out.square().sum().backward()
            found += [out.detach(), x.grad]
        return found

    for one, other in zip(run(True), run(False), strict=True):
        assert_bitwise(one, other)


@pytest.mark.parametrize("name", RECIPES)
def test_an_adapter_reads_what_the_frozen_product_reads(name: str, device: str) -> None:
    """Low-rank adapters are built like this: they compute in high precision and add in place."""
    torch.manual_seed(0)
    linear = ops.Linear(32, 48, device=device)
    alike = copy.deepcopy(linear)
    main = ops.Sequential(
        ops.LayerNorm(32, device=device),
        ops.Quantize(forward=True, backward=False),
        ops.MakeExtraOutput(in_place=True),
        linear,
    )
    main.requires_grad_(False)
    adapter = ops.Sequential(
        ops.Dropout(0.0),
        ops.Linear(32, 8, bias=False, device=device),
        ops.Linear(8, 48, bias=False, device=device),
        ops.ConstantScale(2.0),
        ops.AddExtraInput(in_place=True),
    )
    x = torch.randn(16, 32, device=device, requires_grad=True)
    with te.autocast(recipe=RECIPES[name]):
        out, read = main(x)
        with te.autocast(enabled=False):
            result = adapter(read, out)
    assert isinstance(read, QuantizedTensor)
    (x_grad, *grads) = torch.autograd.grad(result.sum(), [x, *adapter.parameters()])

    values = read.detach().dequantize().requires_grad_()
    with te.autocast(recipe=RECIPES[name]):
        branch = alike(values)
    _, down, up, *_ = adapter
    expected = branch + 2 * up(down(values))
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
    wanted = torch.autograd.grad(expected.sum(), [values, *adapter.parameters()])
    for one, other in zip(grads, wanted[1:], strict=True):
        torch.testing.assert_close(one, other)
    (through_norm,) = torch.autograd.grad(main[0](x), x, wanted[0])
    torch.testing.assert_close(x_grad, through_norm, rtol=2e-2, atol=2e-2)


def test_refusals() -> None:
    with pytest.raises(TypeError, match=r"\[Quantize\] expected x to be a torch.Tensor"):
        ops.Quantize()(None)
    with pytest.raises(ValueError, match=r"\[Quantize\] expected x of shape .*\(layer q\)"):
        ops.Quantize(name="q")(torch.ones(()))


@pytest.mark.parametrize("name", RECIPES)
def test_layers_refuse_its_result_in_words(name: str, device: str) -> None:
    """Only the `Sequential` of operations dequantises for the next layer."""
    layers = {
        "Linear": te.Linear(32, 32, device=device, name="next"),
        "LayerNorm": te.LayerNorm(32, device=device),
        "GELU": ops.GELU(),
        "L2Normalization": ops.L2Normalization(),
        "TransformerLayer": te.TransformerLayer(32, 64, 2, device=device),
    }
    x = torch.randn(16, 1, 32, device=device)
    for kind, layer in layers.items():
        words = rf"\[{kind}\] expected .* in high precision, got Float8.*: pass its dequantize\(\)"
        with te.fp8_autocast(fp8_recipe=RECIPES[name]):
            with pytest.raises(TypeError, match=words) as refused:
                torch.nn.Sequential(ops.Quantize(), layer)(x)
            assert ops.Sequential(ops.Quantize(), layer)(x).shape == x.shape
        assert kind != "Linear" or "(layer next)" in str(refused.value)
