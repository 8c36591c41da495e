"""A module without references is freed at once, like torch's modules: it is in no cycle."""

import gc
import weakref

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)

HIDDEN = 32
MODULES = {
    "Linear": lambda: te.Linear(HIDDEN, 64, device="cpu"),
    "LayerNorm": lambda: te.LayerNorm(HIDDEN, device="cpu"),
    "LayerNormLinear": lambda: te.LayerNormLinear(HIDDEN, 64, device="cpu"),
    "LayerNormMLP": lambda: te.LayerNormMLP(HIDDEN, 64, device="cpu"),
    "TransformerLayer": lambda: te.TransformerLayer(HIDDEN, 64, 2, device="cpu"),
}


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize(
    "recipe",
    [None, DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()],
    ids=["high precision", "delayed", "current", "blocks"],
)
def test_after_steps_of_training(no_collector, make, recipe):
    module = make()
    held = [weakref.ref(module), *map(weakref.ref, module.parameters())]
    for _ in range(3):
        x = torch.randn(16, 1, HIDDEN, requires_grad=True)
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            module(x).sum().backward()
    del module, x
    assert [one() for one in held] == [None] * len(held)
