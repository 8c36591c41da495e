"""Residuals that the last GEMM of a block adds: `TransformerLayer` without dropout."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from fused_layers import batch, build, observed
from precisions import scope
from rulers import assert_bitwise
from sizes import as_large_inputs

import transformer_engine.pytorch as te

BF16 = torch.bfloat16
RECIPES = ["high precision", "delayed", "current"]


def through_hooks(layer: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return layer(x)

    return call


def recomputing(layer: torch.nn.Module) -> torch.nn.Module:
    layer.layernorm_mlp.checkpoint = True
    return layer


WAYS: dict[str, Callable[[torch.nn.Module], Callable[[torch.Tensor], torch.Tensor]]] = {
    "part by part": lambda layer: layer,
    "compiled": lambda layer: torch.compile(layer, backend="aot_eager"),
    "checkpoint": lambda layer: lambda x: te.checkpoint(layer, x, use_reentrant=False),
    "saved tensors through hooks": through_hooks,
    "MLP recomputed": recomputing,
}


def tensors_of(
    call: Callable[[torch.Tensor], torch.Tensor],
    layer: torch.nn.Module,
    recipe: str,
    x: torch.Tensor,
) -> list[torch.Tensor]:
    for p in layer.parameters():
        p.grad = None
    with scope(recipe):
        y = call(x)
    y.backward(torch.linspace(-1.0, 1.0, y.numel(), device=y.device).view(y.shape).to(y))
    return [y, x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", WAYS)
def test_all_ways_give_the_same_bits(way: str, recipe: str, device: str) -> None:
    torch._dynamo.reset()
    first, second = build(device), build(device)
    expected = tensors_of(first, first, recipe, batch(device))
    with as_large_inputs(True) if way == "part by part" else nullcontext():
        found = tensors_of(WAYS[way](second), second, recipe, batch(device))
    for one, other in zip(found, expected, strict=True):
        assert_bitwise(one, other)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_observed_module_returns_its_own_result(large: bool, recipe: str, device: str) -> None:
    """The hook sees the branch alone. The sum is the same, up to one more rounding."""
    first, second, seen = build(device), build(device), []
    second.layernorm_mlp.register_forward_hook(lambda _, x, out: seen.append((*x, *out)))
    with as_large_inputs(large):
        expected = tensors_of(first, first, recipe, batch(device))
        with observed(second.self_attention):
            found = tensors_of(second, second, recipe, batch(device))
    x, _, branch, residual = seen[0]
    assert_bitwise(residual, x)
    assert_bitwise(found[0], (residual.float() + branch.float()).bfloat16())
    torch.testing.assert_close(found[0], expected[0], rtol=2**-6, atol=2**-5)


OTHER_BLOCKS: dict[str, Callable[[str], torch.nn.Module]] = {
    "LayerNormMLP": lambda device: te.LayerNormMLP(64, 128, params_dtype=BF16, device=device),
    "Linear": lambda device: te.Linear(64, 64, params_dtype=BF16, device=device),
}


@pytest.mark.parametrize("way", ["part by part", "compiled"])
@pytest.mark.parametrize("recipe", ["high precision", "delayed"])
@pytest.mark.parametrize("kind", OTHER_BLOCKS)
def test_a_block_that_does_not_return_its_residual(
    kind: str, recipe: str, way: str, device: str
) -> None:
    """The last GEMM of a replaced `layernorm_mlp` adds its input."""
    torch._dynamo.reset()
    first = build(device)
    first.layernorm_mlp = OTHER_BLOCKS[kind](device)
    second, third = copy.deepcopy(first), copy.deepcopy(first)
    expected = tensors_of(first, first, recipe, batch(device))
    with as_large_inputs(way == "part by part"):
        found = tensors_of(WAYS[way](second), second, recipe, batch(device))
    for one, other in zip(found, expected, strict=True):
        assert_bitwise(one, other)
    with observed(third.layernorm_mlp):
        found = tensors_of(third, third, recipe, batch(device))
    torch.testing.assert_close(found, expected, rtol=2**-5, atol=2**-4)


def test_a_block_that_returns_a_bias(device: str) -> None:
    """It is an error, as if a hook observed the block."""
    layer = build(device)
    layer.layernorm_mlp = te.LayerNormMLP(
        64, 128, return_bias=True, params_dtype=BF16, device=device
    )
    with pytest.raises(ValueError, match=r"expected shape .* for the residual"):
        layer(batch(device))


def test_dropout_is_not_added_by_a_gemm(device: str) -> None:
    layer = build(device, hidden_dropout=0.5)
    x = batch(device)
    added = layer(x) != x
    assert 0.6 < added.float().mean() < 0.9  # two blocks drop a half each
    layer.eval()
    assert_bitwise(layer(x), build(device)(x))
