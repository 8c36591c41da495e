"""Graphed and eager calls of one layer share the weights that `is_first_microbatch` caches."""

import copy

import pytest
import torch
from backward_override import OVERRIDES, overriding
from emulated_graphs import emulate, graphs, sample
from graph_helpers import batch, layer
from precisions import RECIPES, scope
from rulers import assert_equal

import transformer_engine.pytorch as te
from transformer_engine.pytorch.cuda_graphs.callables import _replaced

# Calls of a graph (G), eager ones (E) and eager ones without autograd (N), with their flags.
CALLS = {
    "eager between": [("G", True), ("E", True), ("G", False), ("E", False), ("G", False)],
    "graphed between": [("E", True), ("G", True), ("E", False), ("G", False)],
    "eager first": [("E", True), ("G", False), ("E", False)],
    "no first": [("G", False), ("E", False), ("G", False)],
    "eager without one": [("E", False), ("G", False)],
    "without columns": [("G", True), ("N", True), ("G", False), ("E", False)],
    "other recipe": [("G", True), ("E", True, "blocks"), ("G", False), ("E", False)],
    "high precision": [("G", True), ("E", True, "high precision"), ("G", False), ("E", False)],
}


def run(layer, calls, recipe: str, x: torch.Tensor) -> list[torch.Tensor]:
    """Results and gradients of the calls; weights change before each one."""
    found = []
    for kind, first, *other in calls:
        with torch.no_grad():
            for p in layer.parameters():
                p.mul_(0.9)
        layer.train(kind == "G")  # a graphed layer runs eagerly in another mode
        x.grad = None
        with scope(*other or [recipe]), torch.set_grad_enabled(kind != "N"):
            y = layer(x, is_first_microbatch=first)
        found.append(y.detach().clone())
        if kind != "N":
            y.float().square().sum().backward()
            found.append(x.grad)
    return found


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_as_eager_calls(monkeypatch, calls, recipe: str) -> None:
    torch.manual_seed(0)
    eager, x = te.LayerNormMLP(32, 64, device="cpu"), sample()
    graphed = copy.deepcopy(eager)
    expected = run(eager, calls, recipe, x)
    emulate(monkeypatch)
    (part,) = graphs([graphed], [((sample(),), {})], RECIPES[recipe], cached=True)
    assert_equal(run(_replaced(part), calls, recipe, x), expected)


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_backwards_in_high_precision(monkeypatch, calls, override: str) -> None:
    for recipe in ("current", "blocks"):
        monkeypatch.setitem(RECIPES, recipe, overriding(recipe, override))
    test_as_eager_calls(monkeypatch, calls, "current")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_as_eager_calls_on_a_gpu(calls, recipe: str) -> None:
    eager, x = layer(), batch().requires_grad_()
    graphed, samples = copy.deepcopy(eager), (batch().requires_grad_(),)
    how = {"recipe": RECIPES[recipe], "cache_quantized_params": True}
    te.make_graphed_callables(graphed, samples, enabled=True, **how)
    assert_equal(run(graphed, calls, recipe, x), run(eager, calls, recipe, x))


@pytest.mark.gpu
def test_a_backward_does_not_read_weights_that_a_replay_has_overwritten() -> None:
    graphed, x = layer(), batch().requires_grad_()
    how = {"recipe": RECIPES["delayed"], "cache_quantized_params": True}
    te.make_graphed_callables(graphed, (batch().requires_grad_(),), enabled=True, **how)
    with scope("delayed"):
        graphed(x, is_first_microbatch=True)
        graphed.eval()  # which a graph does not run
        y = graphed(x, is_first_microbatch=False)
        graphed.train()
        graphed(x, is_first_microbatch=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
