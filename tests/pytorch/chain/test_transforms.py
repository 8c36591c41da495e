"""Forward-mode differentiation, transforms of torch.func and traces raise an error.

Otherwise tangents would be lost, or state of FP8 changed.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.trace"),  # its category depends on the release
    pytest.mark.filterwarnings("ignore:.*(TorchScript|feature will be):DeprecationWarning"),
]

MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: te.Linear(32, 32, device="cpu", name="fc"),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 32, device="cpu", name="fc"),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 32, device="cpu", name="fc"),
    "RMSNorm": lambda: te.RMSNorm(32, device="cpu"),
    "GELU": te.ops.GELU,
    "TransformerLayer": lambda: te.TransformerLayer(32, 32, 2, device="cpu", name="block"),
}
RECIPES = {"fp32": None, "delayed": DelayedScaling(), "current": Float8CurrentScaling()}


def scope(recipe: str) -> Any:
    return te.fp8_autocast(enabled=recipe != "fp32", fp8_recipe=RECIPES[recipe])


def run(module: nn.Module, x: torch.Tensor, recipe: str) -> torch.Tensor:
    with scope(recipe):
        return module(x)


def refused(what: str) -> Any:
    return pytest.raises(NotImplementedError, match=rf"^\[forward\] expected a call .*{what}")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("recorded", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize("kind", MODULES)
def test_tangents_are_not_lost(kind: str, frozen: bool, recorded: bool, recipe: str) -> None:
    module = MODULES[kind]().requires_grad_(not frozen)
    x = torch.randn(16, 2, 32)
    with torch.set_grad_enabled(recorded), forward_ad.dual_level():
        with refused("forward-mode differentiation"):
            run(module, forward_ad.make_dual(x, torch.ones_like(x)), recipe)
        assert forward_ad.unpack_dual(run(module, x, recipe)).tangent is None
    run(module, x, recipe)


def test_tangents_of_parameters_are_not_lost() -> None:
    module = te.Linear(32, 32, device="cpu", name="fc")
    weight = module.weight.detach()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weight, torch.ones_like(weight))
        with refused(r"forward-mode.*\(layer fc\)"):
            torch.func.functional_call(module, {"weight": dual}, (torch.randn(16, 32),))


TRANSFORMS: dict[str, Callable[[Callable[..., torch.Tensor], torch.Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": torch.func.vjp,
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", MODULES)
def test_transforms_are_refused_and_leave_no_state(kind: str, transform: str, recipe: str) -> None:
    module, twin = MODULES[kind](), MODULES[kind]()
    twin.load_state_dict(module.state_dict())
    x = torch.randn(16, 2, 32)
    with refused(r"transforms of torch\.func"):
        TRANSFORMS[transform](lambda x: run(module, x, recipe), x)
    if kind == "TransformerLayer":  # it has dropout
        module.eval(), twin.eval()
    assert torch.equal(run(module, x, recipe), run(twin, x, recipe))


@pytest.mark.parametrize("transform", ["grad", "vmap"])
@pytest.mark.parametrize("kind", ["Linear", "RMSNorm", "GELU"])
def test_compiled_transforms_do_not_lose_gradients(kind: str, transform: str) -> None:
    module = MODULES[kind]()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def transformed(x: torch.Tensor) -> Any:
        return TRANSFORMS[transform](module, x)

    with pytest.raises(Exception, match=r"\[forward\] expected a call .*torch\.func"):
        transformed(torch.randn(16, 32))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MODULES)
def test_batches_of_backwards_are_refused(kind: str, recipe: str) -> None:
    module, x = MODULES[kind](), torch.randn(16, 2, 32, requires_grad=True)
    y = run(module, x, recipe)
    with refused(r"transforms of torch\.func.*without is_grads_batched"):
        torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True)
    run(module, x, recipe).sum().backward()
    assert x.grad is not None


def test_gradients_of_parameters_by_transforms_are_refused() -> None:
    module, x = te.Linear(32, 32, device="cpu", name="fc"), torch.randn(16, 32)

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(module, parameters, (x,)).sum()

    with refused(r"transforms of torch\.func.*\(layer fc\)"):
        torch.func.grad(loss)(dict(module.named_parameters()))
    assert torch.isfinite(loss(dict(module.named_parameters())))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("recorded", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("before", [0, 3], ids=["first call", "later call"])
@pytest.mark.parametrize("kind", MODULES)
def test_traces_are_refused(kind: str, before: int, recorded: bool, recipe: str) -> None:
    module, x = MODULES[kind]().eval(), torch.randn(16, 2, 32)
    with torch.set_grad_enabled(recorded):
        for _ in range(before):
            run(module, x, recipe)
        with refused(r"torch\.jit\.trace"), scope(recipe):
            torch.jit.trace(module, (x,))
        run(module, x, recipe)


@pytest.mark.parametrize("kind", MODULES)
def test_compiling_for_torchscript_is_refused(kind: str) -> None:
    model = nn.Sequential(nn.Linear(32, 32), MODULES[kind]())
    with pytest.raises(
        NotImplementedError, match=r"^\[torch.jit.script\] expected a model without"
    ):
        torch.jit.script(model)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "attention": lambda x: te.DotProductAttention(2, 16)(x, x, x),
    "rotation": lambda x: apply_rotary_pos_emb(x, torch.zeros(16, 1, 1, 16), fused=True),
}


@pytest.mark.parametrize("recorded", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_traces_of_functions_are_refused(name: str, recorded: bool) -> None:
    x = torch.randn(16, 2, 2, 16, requires_grad=recorded)
    with refused(r"torch\.jit\.trace"):
        torch.jit.trace(FUNCTIONS[name], (x,))


@pytest.mark.parametrize("inside", [True, False], ids=["onnx_export", "plain"])
def test_export_by_torchscript_is_refused(inside: bool) -> None:
    pytest.importorskip("onnx")
    model = nn.Sequential(nn.Linear(32, 32), te.LayerNorm(32, device="cpu"))
    with te.onnx_export(enabled=inside), refused(r"dynamo=False"):
        torch.onnx.export(model, (torch.randn(8, 32),), io.BytesIO(), dynamo=False)
