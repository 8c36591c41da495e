"""Layers whose calls in checkpoints are in FP8 and in high precision, and selective checkpoints."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from checkpoint_helpers import MODES, Wrap, uncheckpointed
from precisions import RECIPES, scope
from rulers import assert_equal
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.fp8.process_state import process_state
from transformer_engine.pytorch.fp8.recompute_regions import may_recompute

FP8 = [name for name in RECIPES if name != "high precision"]
modes = pytest.mark.parametrize("wrap", MODES.values(), ids=MODES)


def off() -> Any:
    return te.fp8_autocast(enabled=False)


def gradients(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return [x.grad.clone(), *(p.grad.clone() for p in layer.parameters())]


@modes
@pytest.mark.parametrize("precision", FP8)
def test_high_precision_after_fp8(precision: str, wrap: Wrap, device: str) -> None:
    """The last steps of the training are in high precision."""
    found: list[list[torch.Tensor]] = []
    for run in (wrap, uncheckpointed):
        torch.manual_seed(0)
        layer = te.LayerNormMLP(32, 64, device=device)
        x = torch.randn(16, 32, device=device, requires_grad=True)
        found.append([])
        for scopes in (scope(precision), off(), scope("high precision")):
            with scopes:
                out = run(layer, x)
            out.square().sum().backward()
            found[-1] += gradients(layer, x)
    assert_equal(*found)


@modes
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "recipes",
    [
        ("current", "blocks"),
        ("delayed", "blocks"),
        ("delayed", "delayed"),
        ("blocks", "high precision"),
    ],
    ids=" then ".join,
)
def test_cached_weights_change_before_the_backward(
    recipes: tuple[str, str], first: bool, wrap: Wrap, device: str
) -> None:
    """A recompute reads the weights of its forward, and leaves those that were cached since."""
    found: list[list[torch.Tensor]] = []
    for run in (wrap, uncheckpointed):
        torch.manual_seed(0)
        layer = te.LayerNormMLP(32, 64, device=device)
        x = torch.randn(16, 32, device=device, requires_grad=True)

        def call(x: torch.Tensor, name: str, first: bool, layer: nn.Module = layer) -> torch.Tensor:
            with scope(name):
                return layer(x, is_first_microbatch=first)

        for known in (True, False):  # a call with cached weights is recorded in the second run
            run(call, x, recipes[0], known).square().sum().backward()
        out = run(call, x, recipes[0], first)
        other = run(call, x * 2, recipes[1], True)
        out.square().sum().backward()
        cached = [stage.cached_weight for stage in layer.chain.matmuls]
        other.square().sum().backward()
        assert all(s.cached_weight is c for s, c in zip(layer.chain.matmuls, cached, strict=True))
        found.append([out.detach(), other.detach(), *gradients(layer, x)])
    assert_equal(*found)


@modes
@pytest.mark.parametrize("order", [(True, False), (False, True)], ids=["fp8 first", "fp8 last"])
@pytest.mark.parametrize("together", [False, True], ids=["in two", "in one"])
def test_attention(together: bool, order: tuple[bool, bool], wrap: Wrap) -> None:
    """Calls in FP8 and in high precision are in one checkpoint, or in one each."""
    recipe = DelayedScaling(fp8_dpa=True)
    found: list[torch.Tensor] = []
    for run in (wrap, uncheckpointed):
        torch.manual_seed(0)
        layer = te.DotProductAttention(2, 16, attn_mask_type="no_mask")

        def call(x: torch.Tensor, enabled: bool, layer: nn.Module = layer) -> torch.Tensor:
            with te.fp8_autocast(enabled=enabled, fp8_recipe=recipe):
                return layer(x, x, x).view(x.shape)

        def both(x: torch.Tensor, call: Wrap = call) -> torch.Tensor:
            return call(call(x, order[0]), order[1])

        x = torch.randn(8, 2, 2, 16, dtype=torch.bfloat16, requires_grad=True)
        out = run(both, x) if together else run(call, run(call, x, order[0]), order[1])
        out.float().square().sum().backward()
        found.append(x.grad)
    assert_equal(*[[grad] for grad in found])


@modes
def test_calls_without_autocast_around_the_first_in_fp8(wrap: Wrap, monkeypatch: Any) -> None:
    monkeypatch.setattr(process_state(), "has_regions", False)  # as in a new process
    found: list[list[torch.Tensor]] = []
    for run in (wrap, uncheckpointed):
        torch.manual_seed(0)
        layer, other = (te.Linear(32, 32, device="cpu") for _ in range(2))

        def function(x: torch.Tensor, layer: nn.Module = layer, other: nn.Module = other) -> Any:
            x = layer(x)
            with te.fp8_autocast():
                x = other(x)
            return layer(x)

        x = torch.randn(16, 32, requires_grad=True)
        run(function, x).square().sum().backward()
        found.append([*gradients(layer, x), *(p.grad for p in other.parameters())])
    assert_equal(*found)


def attention() -> nn.Module:
    return te.DotProductAttention(2, 16, attn_mask_type="no_mask")


def quantized_linear() -> nn.Module:
    return te.ops.Sequential(te.ops.Quantize(), te.ops.Linear(32, 32, device="cpu"))


@modes
@pytest.mark.parametrize("together", [False, True], ids=["in two", "in one"])
@pytest.mark.parametrize("make", [attention, quantized_linear, partial(te.Linear, 32, 32)])
def test_the_first_call_of_a_process_is_outside_of_autocasts(
    make: Wrap, together: bool, wrap: Wrap, monkeypatch: Any
) -> None:
    monkeypatch.setattr(process_state(), "has_regions", False)  # as in a new process
    shape = (8, 2, 2, 16) if make is attention else (16, 32)
    found: list[list[torch.Tensor]] = []
    for run in (wrap, uncheckpointed):
        torch.manual_seed(0)
        layer = make().to("cpu")

        def call(x: torch.Tensor, layer: nn.Module = layer) -> torch.Tensor:
            return layer(*[x] * (3 if x.ndim == 4 else 1)).view(x.shape)

        def in_fp8(x: torch.Tensor, call: Wrap = call) -> torch.Tensor:
            with te.fp8_autocast(fp8_recipe=DelayedScaling(fp8_dpa=True)):
                return call(x)

        def both(x: torch.Tensor, call: Wrap = call, in_fp8: Wrap = in_fp8) -> torch.Tensor:
            return in_fp8(call(x))

        x = torch.randn(*shape, requires_grad=True)
        out = run(both, x) if together else run(in_fp8, run(call, x))
        out.square().sum().backward()
        found.append(gradients(layer, x))
    assert_equal(*found)


def test_calls_in_inference_mode_are_in_no_region(monkeypatch: Any) -> None:
    """The host does no work for regions there, also after a checkpoint in FP8."""
    monkeypatch.setattr(process_state(), "has_regions", True)
    with torch.inference_mode():
        assert not may_recompute(autocast_stack())


@modes
def test_layers_in_high_precision_may_be_called_once_more(wrap: Wrap, monkeypatch: Any) -> None:
    """The first forward may call a layer once more, to fill a cache."""
    monkeypatch.setattr(process_state(), "has_regions", True)
    layer, cache = te.Linear(32, 32, device="cpu"), []
    x = torch.randn(16, 32, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        if not cache:
            with torch.no_grad():
                cache.append(layer(x).abs().mean())
        return layer(x) * cache[0]

    wrap(function, x).sum().backward()
    expected = cache[0] * torch.ones(16, 32) @ layer.weight
    torch.testing.assert_close(x.grad, expected)


@modes
@pytest.mark.parametrize("precision", FP8)
@pytest.mark.parametrize("first_in_fp8", [False, True])
def test_both_in_one_checkpoint(
    first_in_fp8: bool, precision: str, wrap: Wrap, device: str
) -> None:
    found: list[list[torch.Tensor]] = []
    for run in (wrap, uncheckpointed):
        torch.manual_seed(0)
        layer = te.Linear(32, 32, device=device)

        def twice(x: torch.Tensor, layer: nn.Module = layer) -> torch.Tensor:
            with scope(precision, enabled=first_in_fp8):
                x = layer(x).tanh()
            with scope(precision, enabled=not first_in_fp8):
                return layer(x)

        x = torch.randn(16, 32, device=device, requires_grad=True)
        found.append([])
        for _ in range(2):
            run(twice, x).square().sum().backward()
            found[-1] += gradients(layer, x)
    assert_equal(*found)


@modes
@pytest.mark.parametrize("precision", FP8)
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "disabled"])
def test_high_precision_in_a_backward_under_an_autocast(
    inside: bool, precision: str, wrap: Wrap, monkeypatch: Any
) -> None:
    """No call in a checkpoint has been in FP8."""
    monkeypatch.setattr(process_state(), "has_regions", False)
    found: list[list[torch.Tensor]] = []
    for run in (wrap, uncheckpointed):
        torch.manual_seed(0)
        layer = te.LayerNormMLP(32, 64, device="cpu")
        x = torch.randn(16, 32, requires_grad=True)
        with scope(precision) if inside else nullcontext(), off() if inside else nullcontext():
            out = run(layer, x)
        with scope(precision):
            out.square().sum().backward()
        assert not layer.scaling
        found.append(gradients(layer, x))
    assert_equal(*found)


@modes
def test_a_hook_calls_another_layer(wrap: Wrap, monkeypatch: Any) -> None:
    """A hook on the result of a checkpoint runs it in the hook's own autocast, in every step."""
    monkeypatch.setattr(process_state(), "has_regions", False)
    layer, other = (te.Linear(32, 32, device="cpu") for _ in range(2))
    found: list[torch.Tensor] = []

    def hook(grad: torch.Tensor) -> None:
        with torch.no_grad(), scope("current"):
            found.append(other(grad))

    for _ in range(2):
        x = torch.randn(16, 32, requires_grad=True)
        with scope("current"):
            out = wrap(layer, x)
        out.register_hook(hook)
        out.backward(torch.linspace(-1, 1, 512).view(16, 32))
    hook(torch.linspace(-1, 1, 512).view(16, 32))
    assert_equal(found[:1], found[2:])
    assert_equal(found[1:2], found[2:])


def saves(saved: Any, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    keeps = saved is None or op is saved
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def selective(saved: Any, function: Any, x: torch.Tensor) -> torch.Tensor:
    context = partial(create_selective_checkpoint_contexts, partial(saves, saved))
    return checkpoint(function, x, use_reentrant=False, context_fn=context)


class Nested(torch.nn.Module):
    """A layer in a checkpoint, before another layer. `first` is `is_first_microbatch`."""

    def __init__(self, first: bool | None = None) -> None:
        super().__init__()
        self.microbatch = {"is_first_microbatch": first}
        self.first = te.LayerNormMLP(32, 64, device="cpu")
        self.second = te.MultiheadAttention(32, 2, attention_dropout=0.0, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = te.checkpoint(self.first, x, **self.microbatch)
        return self.second(y, attn_mask_type="causal", **self.microbatch)


LAYERS = {
    "mlp": lambda: te.LayerNormMLP(32, 64, device="cpu"),
    "layer": lambda: te.TransformerLayer(
        32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu"
    ),
    "nested": Nested,
    "nested, without a first micro-batch": lambda: Nested(False),
}


@pytest.mark.parametrize("runs", [False, True], ids=["new", "after a step without"])
@pytest.mark.parametrize("saved", ["mm", "view"])  # on the CPU, GEMMs call both
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("precision", RECIPES)
def test_selective_checkpoint(precision: str, kind: str, saved: str, runs: bool) -> None:
    """It compares the operations of both forwards, without what they prepare once."""
    operation = getattr(torch.ops.aten, saved).default
    check_selective(partial(scope, precision), kind, runs, operation)


@pytest.mark.parametrize("runs", [False, True], ids=["new", "after a step without"])
@pytest.mark.parametrize("kind", ["mlp", "layer", "nested"])
@pytest.mark.parametrize("precision", [*RECIPES, "attention"])
def test_selective_checkpoint_that_saves_all(precision: str, kind: str, runs: bool) -> None:
    scopes = partial(scope, precision)
    if precision == "attention":
        scopes = partial(te.fp8_autocast, fp8_recipe=DelayedScaling(fp8_dpa=True))
    check_selective(scopes, kind, runs, None)


def check_selective(scopes: Any, kind: str, runs: bool, saved: Any) -> None:
    wrap = partial(selective, saved)
    found: list[list[torch.Tensor]] = []
    for other in (wrap, uncheckpointed):
        torch.manual_seed(0)
        layer = LAYERS[kind]()
        x = torch.randn(8, 2, 32, requires_grad=True)
        found.append([])
        for run in (*[uncheckpointed] * runs, other, other, other):
            with scopes():
                out = run(layer, x)
            out.square().sum().backward()
            found[-1] += gradients(layer, x)
    assert_equal(*found)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_checkpoint_of_fake_tensors_makes_fake_states() -> None:
    with FakeTensorMode():
        layer = te.Linear(32, 32, device="cpu")
        with scope("delayed"):
            te.checkpoint(layer, torch.randn(16, 32, requires_grad=True), use_reentrant=False)
    assert all(isinstance(state.scale, FakeTensor) for state in layer.scaling.values())
    assert layer.scaling
