"""FP8 weights that `is_first_microbatch` caches belong to one set of micro-batches."""

import pytest
import torch
from precisions import scope

import transformer_engine.pytorch as te

LAYERS = {
    "linear": lambda device: te.Linear(32, 32, device=device),
    "mlp": lambda device: te.LayerNormMLP(32, 64, device=device),
    "one chain": lambda device: te.TransformerLayer(
        32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, device=device
    ),
}


def call(layer, x, recipe, first):
    with scope(recipe):
        return layer(x, is_first_microbatch=first)


def halve_weights(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5)


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", ["current", "blocks"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_first_micro_batch_in_high_precision_ends_the_cache(device, kind, recipe, compiles):
    layer = LAYERS[kind](device)
    run = torch.compile(call, backend="aot_eager") if compiles else call
    x = torch.randn(8, 2, 32, device=device)
    run(layer, x, recipe, True)
    halve_weights(layer)
    run(layer, x, "high precision", True)
    second = run(layer, x, recipe, False)
    assert torch.equal(second, run(layer, x, recipe, None))
    halve_weights(layer)
    assert torch.equal(second, run(layer, x, recipe, False))


def test_the_recompute_of_a_first_micro_batch_leaves_the_cache(device):
    layer = LAYERS["mlp"](device)
    x = torch.randn(16, 32, device=device, requires_grad=True)
    first = te.checkpoint(layer, x, is_first_microbatch=True)
    second = call(layer, x, "current", False)
    first.sum().backward()
    halve_weights(layer)
    assert torch.equal(call(layer, x, "current", False), second)
