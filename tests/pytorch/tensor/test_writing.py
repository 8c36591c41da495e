"""Weights that are written together."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling
from transformer_engine.pytorch.tensor.writing import write

RECIPES = pytest.mark.parametrize("recipe", [DelayedScaling(), Float8BlockScaling()])


@RECIPES
def test_an_error_leaves_whole_weights(recipe, device: str) -> None:
    """All of them have the codes and scales of their old values."""
    with te.fp8_model_init(recipe=recipe):
        weights = [te.Linear(32, 32, device=device).weight for _ in range(3)]
    before = [weight.dequantize() for weight in weights]
    values = 100 * torch.randn(32, 32, device=device)
    with pytest.raises(ValueError, match="expected values of shape"):
        write(weights, [values, values[1:], values])
    for weight, old in zip(weights, before, strict=True):
        assert torch.equal(weight.dequantize(), old)


@RECIPES
def test_weights_may_swap_values(recipe, device: str) -> None:
    with te.fp8_model_init(recipe=recipe):
        weights = [te.Linear(32, 32, device=device).weight for _ in range(2)]
    before = [weight.dequantize() for weight in weights]
    write(weights, weights[::-1])
    for weight, other in zip(weights, before[::-1], strict=True):
        torch.testing.assert_close(weight.dequantize(), other, rtol=0.07, atol=0.01)


def test_written_together_as_alone(device: str) -> None:
    """Weights of several sizes, values of several dtypes."""
    sizes = [(32, 32), (64, 16), (16, 48)]
    values = [torch.randn(size, device=device) for size in sizes]
    values[1] = values[1].bfloat16()
    found = []
    for together in (True, False):
        with te.fp8_model_init():
            layers = [te.Linear(n, m, bias=False, device=device) for m, n in sizes]
        weights = [layer.weight for layer in layers]
        versions = [weight._data._version for weight in weights]
        if together:
            write(weights, values)
        else:
            for weight, value in zip(weights, values, strict=True):
                write([weight], [value])
        pairs = zip(weights, versions, strict=True)
        assert all(weight._data._version > version for weight, version in pairs)
        found.append([weight.dequantize() for weight in weights])
    for ours, theirs, value in zip(*found, values, strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, value.to(ours.dtype), rtol=0.07, atol=0.01)


@pytest.mark.parametrize("shape", [(2,), (1,), ()])
def test_scales_that_users_bring_are_copied(shape: tuple[int, ...], device: str) -> None:
    """They may be 1/scale alone, as those of the target may."""
    with te.fp8_model_init():
        layers = [te.Linear(32, 32, device=device) for _ in "ab"]
    source, weight = layers[0].weight.detach(), layers[1].weight
    scale = source._scale_inv[: torch.Size(shape).numel()].reshape(shape).clone()
    own = source.with_parts([source._data.clone(), scale])
    layers[1].load_state_dict({**layers[1].state_dict(), "weight": own})
    weight.detach().copy_(own)
    assert torch.equal(weight.dequantize(), source.dequantize())
    with torch.no_grad():
        weight.mul_(2)
    torch.testing.assert_close(weight.dequantize(), 2 * source.dequantize())
    own.detach().copy_(weight.detach())
    assert torch.equal(own.dequantize(), weight.dequantize())
