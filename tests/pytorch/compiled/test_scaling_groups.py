"""Delayed scaling of layers that compiled code and eager code call in turn, or one by one."""

import copy

import pytest
import torch
from rulers import assert_bitwise
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.fp8.autocast_stack import reset_autocast
from transformer_engine.pytorch.fp8.process_state import process_state

RECIPES = {
    "history": (DelayedScaling(amax_history_len=4), DelayedScaling(amax_history_len=2)),
    "margin": (DelayedScaling(amax_history_len=4), DelayedScaling(amax_history_len=4, margin=2)),
}


@pytest.fixture(autouse=True)
def _fresh():
    reset_autocast()
    torch._dynamo.reset()


def batch(device: str, step: int, largest: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(16, 32, generator=generator) * largest).to(device).requires_grad_()


def states_of(module: nn.Module) -> list[torch.Tensor]:
    process_state().flush()  # run the updates that compiled code has deferred
    states = [s for m in module.modules() for s in getattr(m, "scaling", {}).values()]
    return [t for s in states for t in (s.scale, s.amax_history)]


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("kind", RECIPES)
def test_eager_calls_under_another_recipe(kind: str, evaluated: bool, device: str) -> None:
    """Eager calls of a layer that was compiled before update its scales by their own recipe."""
    first, second = RECIPES[kind]
    eager = te.Linear(32, 32, device=device)
    twin = copy.deepcopy(eager)
    found: list[list[torch.Tensor]] = []
    for layer in (eager, twin):
        run = layer if layer is eager else torch.compile(layer, backend="aot_eager")
        results = []
        for step in range(2):
            with torch.set_grad_enabled(not evaluated), te.fp8_autocast(fp8_recipe=first):
                results.append(run(batch(device, step)))
            if not evaluated:
                results[-1].sum().backward()
        for step in range(2, 6):
            x = batch(device, step, 100.0)
            with te.fp8_autocast(fp8_recipe=second):
                results.append(layer(x))
            results[-1].sum().backward()
            results.append(x.grad)
        found.append([*results, layer.weight.grad, *states_of(layer)])
    for ours, theirs in zip(*found, strict=True):
        assert_bitwise(ours, theirs)


def test_layers_compiled_one_by_one_share_a_graph(device: str) -> None:
    """The first step is eager and makes the scaling states of all layers."""
    recipe = DelayedScaling(amax_history_len=4)
    eager = nn.Sequential(*[te.LayerNormMLP(32, 64, device=device) for _ in range(3)])
    twin = copy.deepcopy(eager)
    graphs, found = [0], []

    def counting(graph, inputs):
        graphs[0] += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for model in (eager, twin):
        results = []
        for step in range(4):
            if model is twin and step == 1:
                for layer in model:
                    layer.compile(backend=counting)
            x = batch(device, step)
            with te.fp8_autocast(fp8_recipe=recipe):
                y = x
                for layer in model:
                    y = layer(y)
            y.sum().backward()
            results += [y, x.grad]
        found.append([*results, *states_of(model)])
    assert graphs == [1]
    for ours, theirs in zip(*found, strict=True):
        assert_bitwise(ours, theirs)


def test_a_graph_stays_when_a_state_dict_is_loaded(device: str) -> None:
    recipe, layer = DelayedScaling(amax_history_len=4), te.Linear(32, 32, device=device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    twin, found = copy.deepcopy(layer), []
    for module, run in ((layer, compiled), (twin, twin)):
        results = []
        for step in range(4):
            with torch.compiler.set_stance("fail_on_recompile" if step > 1 else "default"):
                with te.fp8_autocast(fp8_recipe=recipe):
                    y = run(batch(device, step, 10.0**step))
                y.sum().backward()
            module.load_state_dict({name: t.clone() for name, t in module.state_dict().items()})
            results.append(y)
        found.append([*results, *states_of(module)])
    for ours, theirs in zip(*found, strict=True):
        assert_bitwise(ours, theirs)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads the input's `.grad`
@pytest.mark.parametrize("apart", [False, True], ids=["new", "of another step"])
def test_modules_that_join_behind_a_compiled_one(apart: bool, device: str) -> None:
    """Within a step, compiled code joins the scaling group of the eager modules before it."""
    recipe, model = DelayedScaling(amax_history_len=4), nn.ModuleList()
    model.extend([te.Linear(32, 32, device=device) for _ in range(3)])
    twin, found = copy.deepcopy(model), []
    for layers in (model, twin):
        first, second, third = layers
        if layers is twin:
            second = torch.compile(second, backend="aot_eager")
        steps = [[first, layers[1]], [third] if apart else [], *[[first, second, third]] * 3]
        results = []
        for step, calls in enumerate(steps):
            x = y = batch(device, step)
            with te.fp8_autocast(fp8_recipe=recipe):
                for call in calls:
                    y = call(y)
            y.sum().backward()
            results += [y, x.grad]
        found.append([*results, *states_of(layers)])
        assert (layers[2].scaling["forward"].scale[:2] != 1.0).all()
    for ours, theirs in zip(*found, strict=True):
        assert_bitwise(ours, theirs)


def test_evaluations_under_another_recipe(device: str) -> None:
    """An evaluation changes neither history lengths nor scaling groups, as in eager mode."""
    recipe, other = RECIPES["history"]
    layer = te.LayerNormMLP(32, 64, device=device)
    twin, found = copy.deepcopy(layer), []
    for module in (layer, twin):
        run = module if module is layer else torch.compile(module, backend="aot_eager")
        results = []
        for step in range(6):
            with torch.no_grad(), te.fp8_autocast(fp8_recipe=other):
                if step > 2:
                    results.append(run(batch(device, step)))
            with te.fp8_autocast(fp8_recipe=recipe):
                y = run(batch(device, step, 2.0**-step))
            y.sum().backward()
            results.append(y)
        found.append([*results, *states_of(module)])
    for ours, theirs in zip(*found, strict=True):
        assert_bitwise(ours, theirs)
