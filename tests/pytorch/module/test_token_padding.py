"""Numbers of tokens that FP8 GEMMs cannot take: rows are independent, results are no views."""

import copy
from pathlib import Path

import pytest
import torch
from debug_session import debugging, section
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Recipe,
)

TOKENS, SOME, WIDTH = 32, 21, 64
BF16 = {"params_dtype": torch.bfloat16, "device": "cpu"}
MODULES = {
    "linear": lambda: te.Linear(WIDTH, 48, **BF16),
    "norm": lambda: te.LayerNormLinear(WIDTH, 48, **BF16),
    "mlp": lambda: te.LayerNormMLP(WIDTH, 96, activation="swiglu", **BF16),
}
SESSIONS = {
    "statistics": [
        section("LogTensorStats", tensors=["activation", "gradient"], stats=["max", "mean"]),
        section("LogFp8TensorStats", tensors=["activation"], stats=["underflows%", "mse"]),
    ],
    # The other GEMM that reads the gradient takes the codes that a fused kernel has written.
    "one GEMM in high precision": [section("DisableFP8GEMM", gemms=["dgrad"])],
}


def trained(kind: str) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A module after a step in FP8, an input, and a gradient that is zero from row `SOME` on."""
    torch.manual_seed(20)
    module = MODULES[kind]()
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)
    with te.fp8_autocast(fp8_recipe=DelayedScaling()):
        y = module(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    grad[SOME:] = 0
    return module, x, grad


def step(module: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """The first rows of the output and of the input's gradient, and the parameters' gradients."""
    module = copy.deepcopy(module)
    module.zero_grad()
    x = x.clone().requires_grad_()
    with te.fp8_autocast(fp8_recipe=DelayedScaling()):
        y = module(x)
    y.backward(grad)
    return [y[:SOME], x.grad[:SOME], *[p.grad for p in module.parameters()]]


def assert_rows_alike(module: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor) -> None:
    """Assert equal results with and without the rows after `SOME`, whose gradient is zero."""
    whole, part = step(module, x, grad), step(module, x[:SOME], grad[:SOME])
    for a, b in zip(part, whole, strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("kind", MODULES)
def test_rows_do_not_depend_on_their_batch(kind: str) -> None:
    assert_rows_alike(*trained(kind))


@pytest.mark.parametrize("session", SESSIONS)
def test_the_same_under_the_debugger(tmp_path: Path, session: str) -> None:
    module, x, grad = trained("mlp")
    with debugging(tmp_path, *SESSIONS[session]):
        assert_rows_alike(module, x, grad)


BLOCKS = {
    **MODULES,
    "norm and its output": lambda: te.LayerNormLinear(
        WIDTH, 48, return_layernorm_output=True, **BF16
    ),
    "attention": lambda: te.MultiheadAttention(WIDTH, 4, attention_dropout=0.0, **BF16),
    "normed attention": lambda: te.MultiheadAttention(
        WIDTH, 4, attention_dropout=0.0, input_layernorm=True, return_layernorm_output=True, **BF16
    ),
    "layer": lambda: te.TransformerLayer(
        WIDTH, 96, 4, hidden_dropout=0.0, attention_dropout=0.0, **BF16
    ),
    "operation": lambda: te.ops.Linear(WIDTH, 48, dtype=torch.bfloat16, device="cpu"),
    "operations": lambda: te.ops.Sequential(
        te.ops.LayerNorm(WIDTH, dtype=torch.bfloat16, device="cpu"),
        te.ops.Linear(WIDTH, 48, dtype=torch.bfloat16, device="cpu"),
    ),
}


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()])
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("needs_grad", [True, False])
def test_results_may_be_changed_in_place(kind: str, recipe: Recipe, needs_grad: bool) -> None:
    torch.manual_seed(21)
    module = BLOCKS[kind]()
    x = torch.randn(5, 4, WIDTH, dtype=torch.bfloat16)
    gradients = []
    for change in (torch.relu, torch.relu_):
        own, rows = copy.deepcopy(module), x.clone().requires_grad_(needs_grad)
        with torch.set_grad_enabled(needs_grad), te.fp8_autocast(fp8_recipe=recipe):
            made = own(rows)
        results = made if isinstance(made, tuple) else (made,)
        assert not any(y._is_view() for y in results)
        changed = [change(y) for y in results if y.dim() == 3]
        if needs_grad:
            sum(y.float().sum() for y in changed).backward()
            assert not rows.grad._is_view()
            gradients.append([rows.grad, *(p.grad for p in own.parameters())])
    for plain, in_place in zip(*gradients or ([], []), strict=True):
        assert_bitwise(plain, in_place)
