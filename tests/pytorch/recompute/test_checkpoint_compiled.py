"""Compiled layers in checkpoints give the results of eager ones, or an error says what to do."""

import copy

import pytest
import torch
from rulers import assert_equal
from torch.utils.checkpoint import checkpoint

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

RECIPES = {"current": Float8CurrentScaling(), "delayed": DelayedScaling(amax_history_len=4)}
WAYS = {
    f"{name}, {'' if reentrant else 'not '}reentrant": (function, reentrant)
    for name, function in (("torch", checkpoint), ("te", te.checkpoint))
    for reentrant in (True, False)
}


def steps(layer, recipe, inside, way=None):
    """Returns outputs and gradients of two steps, with autocast inside or outside of `way`."""
    results = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        x = torch.randn(16, 32, generator=generator).requires_grad_()

        def forward(x):
            with te.fp8_autocast(enabled=inside, fp8_recipe=recipe):
                return layer(x)

        def call(x, forward=forward if inside else layer):
            return forward(x) if way is None else way[0](forward, x, use_reentrant=way[1])

        with te.fp8_autocast(enabled=not inside, fp8_recipe=recipe):
            y = call(x)
        y.square().sum().backward()
        results += [y.detach(), x.grad, *(p.grad for p in layer.parameters())]
        layer.zero_grad()
    return results


@pytest.mark.sampled_on_cpu
@pytest.mark.parametrize("inside", [True, False], ids=["autocast inside", "autocast outside"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_equal_or_refused(recipe, way, inside):
    torch._dynamo.reset()
    eager = te.Linear(32, 48, device="cpu")
    compiled = copy.deepcopy(eager)
    compiled.compile(backend="aot_eager")
    expected = steps(eager, RECIPES[recipe], inside)
    loses_scope = way[0] is checkpoint and not inside
    if recipe == "delayed" or loses_scope:
        with pytest.raises(RuntimeError, match="checkpoint"):
            steps(compiled, RECIPES[recipe], inside, way)
    else:
        assert_equal(steps(compiled, RECIPES[recipe], inside, way), expected)


def test_high_precision_is_free():
    """A layer that never ran in FP8 may be checkpointed, even if other layers ran in FP8."""
    torch._dynamo.reset()
    fp8, plain = (te.Linear(32, size, device="cpu") for size in (32, 48))
    for layer in (fp8, plain):
        layer.compile(backend="aot_eager")
    x = torch.randn(16, 32, requires_grad=True)
    with te.fp8_autocast(fp8_recipe=Float8CurrentScaling()):
        fp8(x).sum().backward()
    checkpoint(plain, x, use_reentrant=True).sum().backward()
    assert plain.weight.grad is not None
