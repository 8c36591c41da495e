"""Modules with FP8 weights under torch.compile: one graph, equal to eager."""

import copy

import pytest
import torch
from fp8_kinds import KINDS, NAMES
from rulers import assert_bitwise
from torch._dynamo.testing import CompileCounter

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch.fp8.autocast_stack import reset_autocast

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
}
MODULES = {
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(32, 48, **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(32, 64, **kw),
    "Linear": lambda **kw: te.Linear(32, 144, **kw),
}
WRITES = {
    "mul_": lambda weight, x: weight.mul_(0.5),
    "copy_": lambda weight, x: weight.copy_(x),
    "quantize_": lambda weight, x: weight.quantize_(x),
    "foreach": lambda weight, x: torch._foreach_mul_([weight], 0.5),
}
kinds = pytest.mark.parametrize("kind", KINDS, ids=NAMES)
traces_fp8 = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="torch 2.11 traces no tensors in FP8"
)


@pytest.fixture(autouse=True)
def _fresh():
    reset_autocast()
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "recipe"), list(zip(MODULES, RECIPES, strict=True)))
def test_training_equals_eager(name: str, recipe: str, device: str) -> None:
    with te.fp8_model_init(recipe=RECIPES[recipe]):
        eager = MODULES[name](device=device)
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, twin)]
    for _ in range(3):
        found = []
        x = torch.randn(16, 32, device=device)
        for module, optimizer in zip((eager, compiled), optimizers, strict=True):
            leaf = x.clone().requires_grad_()
            with te.fp8_autocast(fp8_recipe=RECIPES[recipe]):
                y = module(leaf)
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append((y.detach(), leaf.grad))
        for ours, theirs in zip(*found, strict=True):
            assert_bitwise(theirs, ours)
    for ours, theirs in zip(twin.state_dict().values(), eager.state_dict().values(), strict=True):
        assert_bitwise(ours, theirs)


@kinds
def test_layers_of_other_names_share_a_graph(kind: type, device: str) -> None:
    with te.fp8_model_init(recipe=KINDS[kind]):
        layers = [te.Linear(32, 32, device=device, name=f"layer{i}") for i in range(2)]
    weights = [layer.weight for layer in layers]
    graphs = CompileCounter()

    @torch.compile(fullgraph=True, backend=graphs)
    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.t()

    x = torch.randn(16, 32, device=device)
    for weight in weights:
        with torch.no_grad():
            torch.testing.assert_close(product(x, weight), x @ weight.dequantize().t())
    assert graphs.frame_count == 1


@kinds
def test_inference_inside_one_graph(kind: type, device: str) -> None:
    recipe = KINDS[kind] or RECIPES["current"]
    with te.fp8_model_init(recipe=recipe):
        layer = te.LayerNormMLP(32, 64, device=device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: torch.Tensor) -> torch.Tensor:
        with te.fp8_autocast(fp8_recipe=recipe):
            return layer(x)

    x = torch.randn(16, 32, device=device)
    with torch.no_grad(), te.fp8_autocast(fp8_recipe=recipe):
        expected = layer(x)
    with torch.no_grad():
        assert_bitwise(run(x), expected)


@traces_fp8
@kinds
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("grad", [True, False])
def test_a_graph_reads_what_it_has_written(kind: type, write: str, grad: bool, device: str) -> None:
    recipe = KINDS[kind] or RECIPES["current"]
    with te.fp8_model_init(recipe=recipe):
        eager = te.Linear(32, 32, device=device)
    twin = copy.deepcopy(eager)

    def run(layer: te.Linear, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            first = layer(x)
            WRITES[write](layer.weight, x)
        return first.square() + layer(x)

    x = torch.randn(32, 32, device=device)
    found = []
    for layer, function in ((eager, run), (twin, torch.compile(run, backend="aot_eager"))):
        leaf = x.clone().requires_grad_(grad)
        with torch.set_grad_enabled(grad), te.fp8_autocast(fp8_recipe=recipe):
            y = function(layer, leaf)
        if grad:
            y.sum().backward()
        found.append((y.detach(), layer.weight.dequantize().detach(), leaf.grad, layer.weight.grad))
    for ours, theirs in zip(*found, strict=True):
        if ours is not None:
            torch.testing.assert_close(theirs, ours)


@traces_fp8
@kinds
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_gradients_pass_dequantize(kind: type, dtype: torch.dtype | None, device: str) -> None:
    with te.fp8_model_init(recipe=KINDS[kind]):
        weight = te.Linear(32, 32, device=device, params_dtype=torch.bfloat16).weight
    function = torch.compile(
        lambda w: w.dequantize(dtype=dtype).square().sum(), backend="aot_eager", fullgraph=True
    )
    function(weight).backward()
    assert weight.grad.dtype is torch.bfloat16
    assert_bitwise(weight.grad, 2 * weight.dequantize().detach())
