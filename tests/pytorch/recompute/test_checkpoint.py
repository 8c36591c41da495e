"""Activation checkpointing: a forward that runs again in the backward changes nothing."""

from collections import Counter

import pytest
import torch
from checkpoint_helpers import MODES, Wrap, deepspeed_checkpoint, uncheckpointed
from precisions import RECIPES, scope
from rulers import assert_equal
from torch import nn
from torch.utils.checkpoint import checkpoint

import transformer_engine.pytorch as te
from transformer_engine.pytorch.fp8.autocast_stack import reset_autocast


class Model(nn.Module):
    """Two blocks between layers that are not checkpointed."""

    def __init__(self, device: str, dropout: float = 0.0, fuse: bool = False) -> None:
        super().__init__()
        factory = {"device": device, "params_dtype": torch.float32}
        fused = {"fuse_wgrad_accumulation": fuse}
        self.first = te.Linear(32, 32, **factory)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [
                    te.LayerNormLinear(32, 32, **fused, **factory),
                    te.LayerNormMLP(32, 64, **fused, **factory),
                ]
            )
            for _ in range(2)
        )
        self.dropout = nn.Dropout(dropout)
        self.last = te.Linear(32, 16, **factory)

    def forward(self, x: torch.Tensor, wrap: Wrap, first: bool | None = None) -> torch.Tensor:
        x = self.first(x, is_first_microbatch=first)
        for linear, mlp in self.blocks:

            def block(x, linear=linear, mlp=mlp):
                y = self.dropout(linear(x, is_first_microbatch=first))
                return x + mlp(y, is_first_microbatch=first)

            x = wrap(block, x)
        return self.last(x, is_first_microbatch=first)


def everything(model: nn.Module) -> list[torch.Tensor]:
    """Returns copies of gradients and scaling state."""
    states = [m.scaling for m in model.modules() if getattr(m, "scaling", None)]
    copies = [t.clone() for s in states for v in s.values() for t in (v.scale, v.amax_history)]
    return [p.grad.clone() for p in model.parameters() if p.grad is not None] + copies


def train(recipe: str, wrap: Wrap, device: str = "cpu", dropout: float = 0.0, steps: int = 3):
    torch.manual_seed(1)
    model = Model(device, dropout)
    found = []
    for i in range(steps):
        x = (torch.randn(16, 32) * (i + 1)).to(device).requires_grad_()
        with scope(recipe):
            y = model(x, wrap)
        model.zero_grad()
        y.square().mean().backward()
        found += [y.detach(), x.grad, *everything(model)]
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", MODES)
def test_equal_to_a_run_without(recipe: str, mode: str, device: str) -> None:
    assert_equal(train(recipe, MODES[mode], device), train(recipe, uncheckpointed, device))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_of_deepspeed(recipe: str, device: str) -> None:
    expected = train(recipe, uncheckpointed, device)
    assert_equal(train(recipe, deepspeed_checkpoint, device), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", ["delayed", "blocks"])
def test_weights_kept_in_fp8(mode: str, recipe: str, device: str) -> None:
    with te.quantized_model_init(recipe=RECIPES[recipe]):
        layer = te.LayerNormMLP(32, 64, device=device, params_dtype=torch.float32)
    found = []
    for wrap in (uncheckpointed, MODES[mode]):
        reset_autocast()
        layer.scaling.clear()
        layer.name = "layer"  # drops its call plans
        for i in range(2):
            x = torch.linspace(-1 - i, 1, 512, device=device).view(16, 32).requires_grad_()
            layer.zero_grad()
            with scope(recipe):
                wrap(layer, x).square().sum().backward()
        found.append([x.grad, *everything(layer)])
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("mode", MODES)
def test_grouped_linear(mode: str) -> None:
    def run(wrap: Wrap) -> list[torch.Tensor]:
        reset_autocast()
        torch.manual_seed(1)
        layer = te.GroupedLinear(2, 32, 16, device="cpu", params_dtype=torch.float32)
        for _ in range(2):
            x = torch.randn(48, 32, requires_grad=True)
            with scope("delayed"):
                y = wrap(lambda x: layer(x, [16, 32]), x)
            y.square().sum().backward()
        return [y.detach(), x.grad, *everything(layer)]

    assert_equal(run(MODES[mode]), run(uncheckpointed))


@pytest.mark.parametrize("mode", MODES)
def test_random_numbers_are_drawn_again(mode: str, device: str) -> None:
    expected = train("delayed", uncheckpointed, device, dropout=0.5)
    assert_equal(train("delayed", MODES[mode], device, dropout=0.5), expected)


# After our error, torch 2.11 fails to close the generators of nested checkpoints.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*_checkpoint_without_reentrant")
@pytest.mark.parametrize("outer", MODES)
@pytest.mark.parametrize("inner", MODES)
def test_nested(outer: str, inner: str) -> None:
    def nested(f, x):
        return MODES[outer](lambda x: MODES[inner](f, x).tanh(), x)

    if outer == inner == "torch not reentrant":
        with pytest.raises(RuntimeError, match=r"use transformer_engine\.pytorch\.checkpoint"):
            train("delayed", nested)
    else:
        assert_equal(train("delayed", nested), train("delayed", lambda f, x: f(x).tanh()))


@pytest.mark.filterwarnings("ignore:Exception ignored in.*_checkpoint_without_reentrant")
def test_a_backward_that_begins_behind_nested_checkpoints_of_torch() -> None:
    """A checkpoint of ours is in the same region, and the first that needs the recompute."""
    layer = te.Linear(32, 32, device="cpu")

    def inner(x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(layer, x, use_reentrant=False)
        return te.checkpoint(torch.sin, y)

    with scope("delayed"):
        y = checkpoint(inner, torch.randn(16, 32, requires_grad=True), use_reentrant=False)
    with pytest.raises(RuntimeError, match="expected to find the first forward of a layer"):
        y.sum().backward()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fuse", [False, True])
def test_micro_batches(mode: str, fuse: bool) -> None:
    """Weights are cached; up to two micro-batches, each with its autocast, await their backward."""

    def run(wrap: Wrap) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = Model("cpu", fuse=fuse)
        for p in model.parameters():
            p.main_grad = torch.zeros_like(p)
        found = []
        for step in range(2):
            outs = []
            for i in range(3):
                x = torch.randn(16, 32, requires_grad=True) * (2 * step + i + 1)
                with scope("delayed"):
                    outs.append(model(x, wrap, first=i == 0).sum())
                if len(outs) == 2:
                    outs.pop(0).backward()
            outs.pop().backward()
            found += everything(model) + [p.main_grad.clone() for p in model.parameters()]
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.9)
        return found

    assert_equal(run(MODES[mode]), run(uncheckpointed))


@pytest.mark.parametrize("mode", MODES)
def test_scope_within_the_region(mode: str) -> None:
    """The region contains an autocast, and in it another one that disables FP8."""

    def run(wrap: Wrap) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = Model("cpu")

        def scoped(f, x):
            def inside(x):
                with scope("delayed"):
                    y = f(x)
                    with te.fp8_autocast(enabled=False):
                        return model.last(model.first(y)).sum() + y

            return wrap(inside, x)

        for _ in range(3):
            x = torch.randn(16, 32, requires_grad=True)
            model.zero_grad()
            model(x, scoped).sum().backward()
        return [x.grad, *everything(model)]

    def backward_gemms() -> Counter:
        counts = te.gemm_report(reset=True).counts.items()
        return Counter({k[1:]: n for k, n in counts if k[1] != "fprop"})

    te.gemm_report(reset=True)
    expected = run(uncheckpointed)
    kinds = backward_gemms()
    assert_equal(run(MODES[mode]), expected)
    assert backward_gemms() == kinds
    assert {kind for _, kind in kinds} == {"fp8", "fp32"}


@pytest.mark.parametrize("mode", MODES)
def test_calibration(mode: str) -> None:
    def run(wrap: Wrap) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model, found = Model("cpu"), []
        for _ in range(2):
            x = torch.randn(16, 32, requires_grad=True)
            with scope("delayed", enabled=False, calibrating=True):
                y = model(x, wrap)
            y.sum().backward()
            found += everything(model)
        return found

    assert_equal(run(MODES[mode]), run(uncheckpointed))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("mode", MODES)
def test_evaluation_leaves_no_trace(mode: str) -> None:
    model = Model("cpu")
    with torch.no_grad():
        with scope("delayed"):
            model(torch.randn(16, 32), MODES[mode])
        with scope("delayed"):
            model(torch.randn(16, 32, requires_grad=True), MODES[mode])
    for module in model.modules():
        for state in getattr(module, "scaling", {}).values():
            assert not state.amax_history.any() and (state.scale == 1).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_layer_comes_first(mode: str) -> None:
    """The layer that has gradients updates the scales of gradients, not the frozen one."""

    def run(wrap: Wrap) -> list[torch.Tensor]:
        torch.manual_seed(1)
        frozen = te.Linear(32, 32, device="cpu").requires_grad_(False)
        trained = te.Linear(32, 32, device="cpu")
        for _ in range(2):
            x, y = torch.randn(16, 32), torch.randn(16, 32, requires_grad=True)
            with scope("delayed"):
                out = wrap(lambda x, y: trained(frozen(x) + y), x, y)
            out.sum().backward()
        return [trained.scaling["backward"].scale, y.grad]

    assert_equal(run(MODES[mode]), run(uncheckpointed))
