"""Checkpoints that a tensor hook recomputes, like Megatron's `CheckpointWithoutOutput`."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoint_helpers import MODES, Wrap
from precisions import RECIPES, scope
from rulers import assert_equal
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import (
    activation_recompute_forward,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)
from transformer_engine.pytorch.fp8.autocast_stack import reset_autocast
from transformer_engine.pytorch.fp8.process_state import process_state


class First(torch.autograd.Function):
    """Runs the first forward without autograd, and the backward of the second forward."""

    @staticmethod
    def forward(ctx, owner, function, x):
        with torch.no_grad(), activation_recompute_forward(activation_recompute=True):
            out = function(x)
        ctx.save_for_backward(x.detach())
        owner.ctx = ctx
        return out

    @staticmethod
    def backward(ctx, grad):
        ctx.again.backward(grad)
        return None, None, ctx.x.grad


class WithoutOutput:
    """A checkpoint whose output is freed.

    A hook on a later tensor recomputes the output when the gradient of that tensor arrives.
    """

    def __init__(self, function: Callable[..., Any], x: torch.Tensor) -> None:
        self.function = function
        self.fp8 = te.fp8.FP8GlobalStateManager.is_fp8_enabled()
        self.recipe = te.fp8.FP8GlobalStateManager.get_fp8_recipe() if self.fp8 else None
        self.out = First.apply(self, function, x)

    def free(self, behind: torch.Tensor) -> None:
        self.out.untyped_storage().resize_(0)
        if behind.requires_grad:
            behind.register_hook(self._again)

    def _again(self, grad: torch.Tensor) -> None:
        x = self.ctx.saved_tensors[0].detach().requires_grad_()
        autocast = te.fp8_autocast(enabled=self.fp8, fp8_recipe=self.recipe)
        again = activation_recompute_forward(activation_recompute=True, recompute_phase=True)
        with torch.enable_grad(), autocast, again:
            self.ctx.again = self.function(x)
        self.ctx.x = x
        with torch.no_grad():
            memory, new = self.out.untyped_storage(), self.ctx.again.untyped_storage()
            memory.resize_(new.size())
            memory.copy_(new)


def without_output(function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    checkpoint = WithoutOutput(function, x)
    behind = nn.functional.silu(checkpoint.out)  # silu saves the output
    checkpoint.free(behind)
    return behind


def plain(function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(function(x))


class Model(nn.Module):
    """Two checkpoints between plain layers; in each, one layer runs twice."""

    def __init__(self, device: str, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        make = {"device": device, "params_dtype": torch.float32}
        self.first, self.last = te.Linear(32, 32, **make), te.Linear(32, 32, **make)
        self.ups = nn.ModuleList(te.LayerNormLinear(32, 32, **make) for _ in range(2))
        twice = [te.Linear(32, 32, **make) for _ in range(2)]
        self.twice = nn.ModuleList(twice[:1] * 2 if shared else twice)

    def forward(self, x: torch.Tensor, wrap: Wrap) -> torch.Tensor:
        x = self.first(x)
        for up, twice in zip(self.ups, self.twice, strict=True):
            x = x + wrap(lambda x, up=up, twice=twice: twice(up(twice(x))), x)
        return self.last(x)


def everything(model: nn.Module) -> list[torch.Tensor]:
    """Returns gradients and scaling state."""
    states = [m.get_extra_state() for m in model.modules() if hasattr(m, "scaling")]
    return [p.grad.clone() for p in model.parameters() if p.grad is not None] + states


def trained(
    recipe: str, wrap: Wrap, device: str = "cpu", in_flight: int = 1, shared: bool = False
) -> list[torch.Tensor]:
    """Trains three steps of three micro-batches, whose backwards have the order of the forwards.

    `in_flight` is the number of forwards before the first backward. With 4, one backward runs for
    the sum of all losses.
    """
    reset_autocast()
    model, found = Model(device, shared), []
    for step in range(3):
        losses: list[torch.Tensor] = []
        model.zero_grad()
        for i in range(3):
            x = torch.linspace(-1 - i - 3 * step, 1, 512, device=device).view(16, 32)
            with scope(recipe):
                losses.append(model(x.requires_grad_(), wrap).square().mean())
            if len(losses) == in_flight:
                losses.pop(0).backward()
        for loss in [sum(losses)] if in_flight == 4 else losses:
            loss.backward()
        found += everything(model)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("in_flight", [1, 3])
def test_equal_to_a_run_without(recipe: str, in_flight: int, device: str) -> None:
    assert_equal(*[trained(recipe, w, device, in_flight) for w in (without_output, plain)])


def test_of_a_layer_in_high_precision_before_one_in_fp8() -> None:
    found = []
    for wrap in (without_output, plain):
        torch.manual_seed(0)
        layers = [te.Linear(32, 32, device="cpu") for _ in range(2)]

        def both(x: torch.Tensor, layers: list[nn.Module] = layers) -> torch.Tensor:
            with te.fp8_autocast(enabled=False):
                x = layers[0](x)
            return layers[1](x)

        with te.fp8_autocast():
            out = wrap(both, torch.randn(16, 32).requires_grad_())
        out.square().sum().backward()
        found.append([layer.weight.grad for layer in layers])
    assert_equal(*found)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("in_flight", [1, 3, 4])
def test_a_layer_of_two_checkpoints(recipe: str, in_flight: int) -> None:
    """Gradients are summed in the order of backwards, as with `te.checkpoint`."""

    def expected(function, x):
        return plain(lambda x: MODES["te"](function, x), x)

    runs = [trained(recipe, w, "cpu", in_flight, shared=True) for w in (without_output, expected)]
    assert_equal(*runs)


@pytest.mark.parametrize("mode", ["te", "torch"])
def test_within_another_checkpoint(mode: str) -> None:

    def nested(function, x):
        return MODES[mode](lambda x: without_output(function, x).tanh(), x)

    def expected(function, x):
        return MODES[mode](lambda x: plain(function, x).tanh(), x)

    assert_equal(trained("delayed", nested), trained("delayed", expected))


def test_within_itself() -> None:
    def nested(function, x):
        return without_output(lambda x: without_output(function, x).tanh(), x)

    def expected(function, x):
        return plain(lambda x: plain(function, x).tanh(), x)

    assert_equal(trained("delayed", nested, in_flight=2), trained("delayed", expected, in_flight=2))


def test_hooks_on_results_of_other_checkpoints() -> None:
    """Several checkpoints are open at once; the output of one starts the recompute of another."""

    def chained(mode: Wrap) -> Wrap:
        def wrap(function, x):
            one = WithoutOutput(function, x)
            two = WithoutOutput(torch.tanh, one.out)
            out = mode(torch.sin, two.out)
            one.free(out)  # hooks run in this order
            two.free(out)
            return out

        return wrap

    def expected(function, x):
        return torch.sin(torch.tanh(function(x)))

    for mode in MODES.values():
        assert_equal(trained("delayed", chained(mode)), trained("delayed", expected))


@pytest.mark.parametrize("alive", [False, True])
def test_forwards_without_a_backward(alive: bool, device: str) -> None:
    """Records of forwards without a backward are not used by others, and go with their graphs."""
    found = []
    for wrap in (without_output, plain):
        reset_autocast()
        model, graphs = Model(device), []
        for i in range(3):
            for scale in (7, 1):  # the first forward has no backward
                x = torch.linspace(-1 - i, scale, 512, device=device).view(16, 32)
                with scope("delayed"):
                    out = model(x.requires_grad_(), wrap)
                if alive:
                    graphs.append(out)
            model.zero_grad()
            out.square().mean().backward()
            found.append(everything(model))
        with torch.no_grad(), scope("delayed"):
            model.eval()(x, wrap)
        if wrap is without_output:
            gc.collect()
            assert len(process_state().checkpoints) == (2 * 6 if alive else 2)
        del out, graphs
        gc.collect()
        assert not process_state().checkpoints
    for one, other in zip(found[:3], found[3:], strict=True):
        assert_equal(one, other)


def test_high_precision(device: str) -> None:
    """High precision before and after steps in FP8, and within a checkpoint."""

    def within(function, x):
        with te.fp8_autocast(enabled=False):
            return function(x)

    found = []
    for wrap in (without_output, plain):
        reset_autocast()
        model = Model(device)
        for enabled in (False, True, True):
            x = torch.linspace(-1, 1, 512, device=device).view(16, 32).requires_grad_()
            with scope("delayed", enabled=enabled):
                out = wrap(model.ups[0], x)
                out = wrap(lambda x, model=model: within(model.ups[1], x), out)
            out.square().mean().backward()
            found += [out.detach(), x.grad]
    assert_equal(found[:6], found[6:])


def test_what_is_asked_in_both_forwards() -> None:
    layer, asked = te.Linear(32, 32, device="cpu"), []

    def asking(x: torch.Tensor) -> torch.Tensor:
        asked.append((is_fp8_activation_recompute_enabled(), in_fp8_activation_recompute_phase()))
        return layer(x)

    with te.fp8_autocast():
        out = without_output(asking, torch.ones(16, 32, requires_grad=True))
    out.sum().backward()
    assert asked == [(True, False), (True, True)]
    assert not is_fp8_activation_recompute_enabled()


def test_a_layer_that_runs_more_often_again() -> None:
    layer, more = te.Linear(32, 32, device="cpu"), []

    def function(x: torch.Tensor) -> torch.Tensor:
        more.append(0)
        for _ in more:
            x = layer(x)
        return x

    with te.fp8_autocast():
        out = without_output(function, torch.ones(16, 32, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"expected 1 call\(s\) of layer .* got more"):
        out.sum().backward()
