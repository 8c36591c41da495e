"""Arguments of `te.checkpoint`, and functions that can be checkpointed."""

import pytest
import torch
from checkpoint_helpers import MODES, Wrap, uncheckpointed
from precisions import scope
from rulers import assert_equal
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.fp8.autocast_stack import reset_autocast


@pytest.mark.parametrize("reentrant", [True, False])
def test_keyword_arguments(reentrant: bool) -> None:
    layer = te.Linear(32, 32, device="cpu", params_dtype=torch.float32)

    def function(x, *, parts, scale=1.0):
        return layer(x) * scale + parts["a"] * parts["b"][0], parts["a"]

    x, a, b = (torch.randn(16, 32, requires_grad=True) for _ in range(3))
    found = []
    for wrap in (lambda f, *args, **kw: f(*args, **kw), te.checkpoint):
        more = {"use_reentrant": reentrant} if wrap is te.checkpoint else {}
        with scope("current"):
            y, _ = wrap(function, x, parts={"a": a, "b": [b]}, scale=2.0, **more)
        y.square().sum().backward()
        found.append([t.grad for t in (x, a, b, layer.weight)])
        for t in (x, a, b, layer.weight):
            t.grad = None
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("enabled", [True, False])
def test_functions_may_have_arguments_with_names_of_torchs(enabled: bool) -> None:
    """`debug` is an argument of the function, except with `use_reentrant=False`."""

    def function(x, debug=False):
        return x * (2 if debug else 1)

    x = torch.ones(4, requires_grad=True)
    with torch.set_grad_enabled(enabled):
        assert torch.equal(te.checkpoint(function, x, debug=True), 2 * x)


def test_twice_over_one_graph() -> None:
    layer = te.Linear(32, 32, device="cpu", params_dtype=torch.float32)
    found = []
    for wrap in (uncheckpointed, MODES["te not reentrant"], MODES["torch not reentrant"]):
        reset_autocast()
        layer.scaling.clear()
        layer.to(torch.float32)  # drops its call plans
        x = torch.linspace(-1, 1, 512).view(16, 32).requires_grad_()
        with scope("delayed"):
            y = wrap(layer, x)
        found.append([torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2)])
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_tracker(reentrant: bool, device: str) -> None:
    """The recompute starts with the states that the tracker had in the first forward."""
    layer = te.Linear(32, 32, device=device, params_dtype=torch.float32)

    def run(wrap: Wrap) -> list[torch.Tensor]:
        torch.manual_seed(2)
        tracker = te.CudaRNGStatesTracker(device)
        tracker.add("model-parallel-rng", 7)

        def function(x):
            with tracker.fork():
                return nn.functional.dropout(layer(x), 0.5)

        found = []
        for _ in range(2):
            x = torch.ones(16, 32, device=device, requires_grad=True)
            layer.zero_grad()
            y = wrap(function, x, tracker)
            y.sum().backward()
            found += [y.detach(), x.grad, layer.weight.grad]
        with tracker.fork():
            return [*found, torch.rand(4, device=device)]

    expected = run(lambda f, x, tracker: f(x))
    actual = run(
        lambda f, x, tracker: te.checkpoint(
            f, x, get_rng_state_tracker=lambda: tracker, use_reentrant=reentrant
        )
    )
    assert_equal(actual, expected)


def test_functions_without_our_modules_are_torchs() -> None:
    calls = []

    class Half(nn.Module):
        def forward(self, x):
            y = x.exp()
            calls.append(1)  # not reached if torch stops early
            return y

    x = torch.ones(3, requires_grad=True)
    te.checkpoint(Half(), x, use_reentrant=False).sum().backward()
    assert len(calls) == 1
    te.checkpoint(Half().forward, x, use_reentrant=False).sum().backward()
    assert len(calls) == 3  # no early stop, as documented


def test_transformer_layer(device: str, monkeypatch) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    torch.manual_seed(1)
    layer = te.TransformerLayer(
        64, 128, 4, hidden_dropout=0.1, attention_dropout=0.1, device=device
    )
    found = []
    for wrap in (uncheckpointed, *MODES.values()):
        torch.manual_seed(3)
        x = torch.randn(16, 2, 64, device=device, requires_grad=True)
        layer.zero_grad()
        with scope("current"):
            y = wrap(layer, x)
        y.sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    for actual in found[1:]:
        assert_equal(actual, found[0])


def test_torch_autocast() -> None:
    layer = te.LayerNormMLP(32, 64, device="cpu", params_dtype=torch.float32)
    found = []
    for wrap in (uncheckpointed, *MODES.values()):
        x = torch.linspace(-1, 1, 512).view(16, 32).requires_grad_()
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16), scope("current"):
            y = wrap(layer, x)
        y.float().sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    for actual in found[1:]:
        assert_equal(actual, found[0])


def test_positional_arguments_of_older_versions() -> None:
    layer = te.Linear(32, 32, device="cpu")
    tracker = te.CudaRNGStatesTracker("cpu")
    x = torch.randn(16, 32, requires_grad=True)
    with pytest.warns(DeprecationWarning, match="by keyword"):
        y = te.checkpoint(layer, False, lambda: tracker, None, x)
    assert torch.equal(y, layer(x))
    assert distributed.checkpoint is te.checkpoint


def test_errors() -> None:
    layer = te.Linear(32, 32, device="cpu")
    x = torch.randn(16, 32, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"torch\.distributed to be initialised"):
        te.checkpoint(layer, x, distribute_saved_activations=True)
    te.checkpoint(layer, x, distribute_saved_activations=True, use_reentrant=False)  # ignored
    with pytest.raises(TypeError, match=r"^\[checkpoint\] expected function .*, got int$"):
        te.checkpoint(3, x)
    tracker = te.CudaRNGStatesTracker(device="cpu")
    with pytest.raises(TypeError, match=r"^\[checkpoint\] expected get_rng.*lambda: tracker\?$"):
        te.checkpoint(layer, x, get_rng_state_tracker=tracker)
    with pytest.raises(TypeError, match=r"^\[checkpoint\] .* to return a tracker, .* got a int$"):
        te.checkpoint(layer, x, get_rng_state_tracker=lambda: 3)
    with pytest.raises(RuntimeError, match="use_reentrant"):
        torch.autograd.grad(te.checkpoint(layer, x).sum(), x)

    repeats = iter([1, 2])

    def longer(x):
        for _ in range(next(repeats)):
            x = layer(x)
        return x

    with scope("delayed"):
        y = te.checkpoint(longer, x)
    with pytest.raises(RuntimeError, match=r"call\(s\) of layer"):
        y.sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_other_layers_the_second_time(mode: str) -> None:
    """A lambda over the variable of a loop calls the last layer when it runs again."""
    y = torch.randn(16, 32, requires_grad=True)
    with scope("delayed"):
        for layer in [te.Linear(32, 32, device="cpu", name=name) for name in "ab"]:
            y = MODES[mode](lambda x: layer(x), y)  # noqa: B023, PLW0108
    with pytest.raises(RuntimeError, match=r"variable of a loop .*layer"):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_results_within_containers_have_gradients(reentrant: bool) -> None:
    layer = te.Linear(32, 32, device="cpu")

    def function(x: torch.Tensor) -> tuple:
        y = layer(x)
        return y, {"twice": 2 * y, "name": "fc"}, [None, 3 * y]

    x = torch.randn(16, 32, requires_grad=True)
    first, named, (nothing, third) = te.checkpoint(function, x, use_reentrant=reentrant)
    assert named["name"] == "fc" and nothing is None
    (first + named["twice"] + third).sum().backward()
    torch.testing.assert_close(layer.bias.grad, torch.full((32,), 6.0 * 16))
    alone = te.checkpoint(lambda x: {"y": layer(x)}, x, use_reentrant=reentrant)
    alone["y"].sum().backward()
    torch.testing.assert_close(layer.bias.grad, torch.full((32,), 7.0 * 16))


@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormMLP])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_parameter_among_the_results(kind: type[nn.Module], use_reentrant: bool) -> None:
    """With `return_bias=True` a layer returns its bias."""
    found = []
    for wrap in (te.checkpoint, uncheckpointed):
        torch.manual_seed(0)
        layer = kind(32, 32, return_bias=True, device="cpu")
        x = torch.randn(8, 32, requires_grad=True)
        options = {"use_reentrant": use_reentrant} if wrap is te.checkpoint else {}
        out, bias = wrap(layer, x, **options)
        assert all(p.is_leaf for p in layer.parameters())
        (out.square().sum() + bias.sum()).backward()
        found.append([x.grad, *(p.grad for p in layer.parameters())])
    assert_equal(*found)


def test_a_captured_tensor_among_the_results() -> None:
    found = []
    for wrap in (te.checkpoint, uncheckpointed):
        torch.manual_seed(0)
        layer = te.Linear(32, 32, device="cpu")
        x, captured = torch.randn(8, 32, requires_grad=True), layer.weight.t()
        out, same = wrap(lambda x, layer=layer, captured=captured: (layer(x), captured), x)
        (out.square().sum() + same.square().sum()).backward()
        found.append([x.grad, *(p.grad for p in layer.parameters())])
    assert_equal(*found)


def test_a_frozen_parameter_among_the_results() -> None:
    layer = te.Linear(32, 32, return_bias=True, device="cpu")
    layer.bias.requires_grad_(False)
    x = torch.randn(8, 32, requires_grad=True)
    out, bias = te.checkpoint(layer, x)
    assert layer.bias.is_leaf and not layer.bias.requires_grad
    out.mul_(2.0)  # as without a checkpoint
    (out.sum() + bias.sum()).backward()
    torch.testing.assert_close(x.grad, 2.0 * layer.weight.sum(0).expand(8, 32))
    assert layer.bias.grad is None
