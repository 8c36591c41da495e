"""The scaling state of compiled layers: made when they are traced, for the recipe of the graph."""

import copy
from contextlib import nullcontext

import pytest
import torch
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling


def largest(history):
    """Computes what `amax_compute_algo="max"` does."""
    return history.amax(0)


OWN = DelayedScaling(amax_history_len=4, amax_compute_algo=largest)


def function_of(layer):
    """A function that runs the layer in an autocast, with a recipe that it makes, or with `OWN`."""

    def step(x, length=None, algorithm="max"):
        recipe = OWN
        if length is not None:
            recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm)
        with te.fp8_autocast(fp8_recipe=recipe):
            return layer(x)

    return step


@pytest.fixture
def pair(device):
    """A layer and its compiled function, and an equal layer and its eager function."""
    torch._dynamo.reset()
    layer = te.Linear(32, 32, device=device)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(function_of(layer), backend="aot_eager", fullgraph=True)
    return (layer, compiled), (twin, function_of(twin))


def train(pair, x, *arguments):
    """Runs a training step of both layers, whose results must be equal."""
    found = []
    for layer, step in pair:
        y = step(x, *arguments)
        y.sum().backward()
        found += [(y, layer.weight.grad.clone())]
    for of_compiled, of_eager in zip(*found, strict=True):
        assert_bitwise(of_compiled, of_eager)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_one_graph_from_the_first_step_on(pair, algorithm, device):
    x = torch.randn(32, 32, device=device)
    train(pair, x, 4, algorithm)
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(4):
            train(pair, (2 + step) * x, 4, algorithm)


def test_functions_of_ones_own(pair, device):
    for step in range(4):
        train(pair, torch.full((32, 32), 1.0 + step, device=device))


def test_another_length_of_the_history(pair, device):
    """Dynamo would make the third length a symbol, which the scaling state cannot have."""
    for length in (4, 8, 16, 4):
        for step in range(2):
            train(pair, torch.full((32, 32), 1.0 + step + length, device=device), length)
        assert pair[0][0].scaling["forward"].length == length


def test_another_recipe_elsewhere_compiles_nothing_again(pair, device):
    x = torch.randn(32, 32, device=device)
    train(pair, x, 4)
    other = te.Linear(32, 32, device=device)
    torch.compile(function_of(other), backend="aot_eager", fullgraph=True)(x, 8)
    with torch.compiler.set_stance("fail_on_recompile"):
        train(pair, 3 * x, 4)
        train(pair, x, 4)


def test_loaded_states_are_updated(pair, device):
    """Loaded states are new objects, which must join the scaling group of compiled code."""
    x = torch.randn(32, 32, device=device)
    for step in range(2):
        train(pair, (1 + step) * x, 4)
    for layer, _ in pair:
        layer.load_state_dict(copy.deepcopy(layer.state_dict()))
    for step in range(3):
        train(pair, (5 + step) * x, 4)
    assert pair[0][0].scaling["forward"].scale[0].item() != 1.0


# An autocast in eager mode would run updates that compiled code has deferred. So in the next
# three tests, the compiled layer runs all its steps before the eager one does.


def test_another_recipe_ends_no_step_of_the_one_before(pair, device):
    """The graph of the other recipe is traced while an update is deferred."""
    found = []
    for layer, step in pair:
        results = []
        for i, algorithm in enumerate(("max", "max", "most_recent", "max", "most_recent")):
            torch.manual_seed(i)
            x = torch.randn(32, 32, device=device) / (1 + i)
            results.append(step(x, 4, algorithm))
            results[-1].sum().backward()
        found.append([*results, layer.scaling["forward"].amax_history])
    for of_compiled, of_eager in zip(*found, strict=True):
        assert_bitwise(of_compiled, of_eager)


def test_copies_have_what_is_deferred(pair, device):
    layer, step = pair[0]
    for _ in range(2):
        step(torch.randn(32, 32, device=device), 4).square().sum().backward()
    copied = copy.deepcopy(layer)
    assert_bitwise(copied.get_extra_state(), layer.get_extra_state())
    assert copied.scaling["backward"].scale[0].item() != 1.0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's own
def test_a_graph_break_within_an_autocast(device):
    """The second graph begins while updates of the first are deferred."""
    torch._dynamo.reset()
    layers = [te.Linear(32, 32, device=device) for _ in range(2)]
    twins = copy.deepcopy(layers)
    recipe = DelayedScaling(amax_history_len=4)

    def step(first, second, x):
        with te.fp8_autocast(fp8_recipe=recipe):
            y = first(x)
            torch._dynamo.graph_break()
            return second(y)

    found = []
    for pieces, call in ((layers, torch.compile(step, backend="aot_eager")), (twins, step)):
        for i in range(4):
            torch.manual_seed(i)
            call(*pieces, torch.randn(32, 32, device=device)).square().sum().backward()
        found.append([piece.get_extra_state() for piece in pieces])
    for ours, theirs in zip(*found, strict=True):
        assert_bitwise(ours, theirs)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled", [(0,), (1,), (0, 1)], ids=str)
def test_compiled_layers_among_eager_ones(compiled, device):
    """Scales and gradients are those of eager mode, whether or not a compiled layer runs first."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = [te.Linear(32, 32, device=device) for _ in range(2)]
    twins = copy.deepcopy(eager)
    called = [
        torch.compile(layer, backend="aot_eager") if i in compiled else layer
        for i, layer in enumerate(twins)
    ]
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(32, 32, device=device)
        for first, second in (eager, called):
            with te.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=4)):
                y = second(first(x))
            (y * 1e-6).sum().backward()
    with te.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=4)):
        pass  # updates that compiled code has deferred
    for layer, twin in zip(eager, twins, strict=True):
        assert layer.scaling["backward"].scale[0] > 1e6
        assert_bitwise(twin.weight.grad, layer.weight.grad)
        for direction, state in layer.scaling.items():
            assert_bitwise(twin.scaling[direction].scale, state.scale)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("delayed", [True, False])
def test_eager_layers_in_an_autocast_of_compiled_code(delayed, nested, device):
    """Layers that run eagerly after a graph break have the scales of eager mode.

    After the autocast they run in high precision.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    recipe = DelayedScaling(amax_history_len=4)
    layers = [
        te.Linear(32, 32, device=device, delay_wgrad_compute=delayed and i == 1) for i in range(3)
    ]
    twins = copy.deepcopy(layers)

    def function_of(first, second, third):
        if not delayed:
            second = torch.compiler.disable(second)

        def step(x):
            with te.fp8_autocast(fp8_recipe=recipe):
                return third(second(first(x)))

        return step

    eager = function_of(*layers)
    compiled = torch.compile(function_of(*twins), backend="aot_eager")
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(32, 32, device=device)
        for run, own in ((eager, layers), (compiled, twins)):
            with te.fp8_autocast(fp8_recipe=recipe) if nested else nullcontext():
                y = run(x)
            (y * 1e-6).sum().backward()
            if delayed:
                own[1].backward_dw()
            assert own[1](x).sub(torch.nn.functional.linear(x, own[1].weight)).abs().max() < 1e-4
    with te.fp8_autocast(fp8_recipe=recipe):
        pass  # updates that compiled code has deferred
    for layer, twin in zip(layers, twins, strict=True):
        assert_bitwise(twin.weight.grad, layer.weight.grad)
        for direction, state in layer.scaling.items():
            assert_bitwise(twin.scaling[direction].scale, state.scale)
