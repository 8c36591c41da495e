"""Chains as operators of compiled code: which layers share one, and how calls may differ."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from chain_graphs import ChainGraphs
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.chain import compiled
from transformer_engine.pytorch.fp8.autocast_stack import reset_autocast
from transformer_engine.pytorch.fp8.process_state import OUTSIDE
from transformer_engine.pytorch.module.plans import plan_of_operator

HIDDEN = 32


@pytest.fixture(autouse=True)
def _fresh() -> None:
    reset_autocast()
    torch._dynamo.reset()


def step(call: Any, x: torch.Tensor, recipe: DelayedScaling | None) -> list[torch.Tensor]:
    with te.fp8_autocast(recipe is not None, fp8_recipe=recipe):
        y = call(x)
    y.float().square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


def leaf(rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, requires_grad=True)


def test_layers_that_are_alike_share_a_graph() -> None:
    graphs = ChainGraphs()
    for name in ("first", "second"):
        layer = te.LayerNormMLP(HIDDEN, 64, device="cpu", name=name)
        layer.compile(fullgraph=True, backend=graphs)
        layer(torch.ones(16, HIDDEN))
    other = te.LayerNormMLP(HIDDEN, 64, device="cpu", activation="relu")
    other.compile(fullgraph=True, backend=graphs)
    other(torch.ones(16, HIDDEN))
    first, second = graphs.keys
    assert len(first) == len(second) == 1 and first != second


def test_layers_on_other_devices_have_operators_of_their_own() -> None:
    """An operator depends on the memory plan of a recording, which is made for one device."""
    layer = te.LayerNormMLP(HIDDEN, 64, device="cpu")
    facts = (OUTSIDE, torch.float32, (True,) * 7)
    devices = [torch.device("cuda", index) for index in (0, 0, 1)]
    plans = [plan_of_operator(layer, layer.chain, *facts, device, ()) for device in devices]
    first, same, other = [plan.operator for plan in plans]
    assert first == same != other


def test_a_setting_that_changes_is_another_operator() -> None:
    graphs = ChainGraphs()
    layer = te.Linear(HIDDEN, 64, device="cpu")
    call = torch.compile(layer, fullgraph=True, backend=graphs)
    call(torch.ones(16, HIDDEN))
    layer.save_original_input = True
    call(torch.ones(16, HIDDEN))
    first, second = graphs.keys
    assert first != second


def test_other_code_has_other_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an update of the package, graphs in caches on disk must not run with its new code."""
    keys = []
    for sources in ("old", "new"):
        monkeypatch.setattr(compiled, "_hash_of_sources", lambda sources=sources: sources)
        torch._dynamo.reset()
        graphs = ChainGraphs()
        call = torch.compile(te.Linear(HIDDEN, 64, device="cpu"), fullgraph=True, backend=graphs)
        call(torch.ones(16, HIDDEN))
        keys += graphs.keys
    first, second = keys
    assert first != second


@pytest.mark.parametrize("lengths", [(4, 9), (9, 4)])
def test_histories_of_any_length(lengths: tuple[int, int]) -> None:
    eager = te.LayerNormLinear(HIDDEN, 64, device="cpu")
    call = torch.compile(copy.deepcopy(eager), fullgraph=True, backend="aot_eager")
    for length in (*lengths, *lengths):
        x = leaf()
        recipe = DelayedScaling(amax_history_len=length)
        twin = x.detach().clone().requires_grad_()
        for got, wanted in zip(step(call, x, recipe), step(eager, twin, recipe), strict=True):
            assert_bitwise(got, wanted)


def test_inputs_that_recordings_refuse() -> None:
    """After a recorded call comes an input that begins at 4 bytes, which no recording takes."""
    eager = te.LayerNormLinear(HIDDEN, 64, device="cpu")
    call = torch.compile(copy.deepcopy(eager), fullgraph=True, backend="aot_eager")
    for offset in (0, 1, 0):
        values = torch.randn(16 * HIDDEN + 1)[offset : offset + 16 * HIDDEN].view(16, HIDDEN)
        results = [step(m, values.detach().requires_grad_(), None) for m in (call, eager)]
        for got, wanted in zip(*results, strict=True):
            assert_bitwise(got, wanted)


@pytest.mark.parametrize("shape", [(16, HIDDEN), (2, 8, HIDDEN)])
def test_results_that_backward_reads(shape: tuple[int, ...]) -> None:
    """The output of the norm is returned, and the weight gradient is computed from it."""
    eager = te.LayerNormLinear(HIDDEN, 64, return_layernorm_output=True, device="cpu")
    twin = copy.deepcopy(eager)
    call = torch.compile(twin, fullgraph=True, backend="aot_eager")
    x = torch.randn(shape, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    made = [*eager(x), *call(y)]
    (made[0].square().sum() + made[1].square().sum()).backward()
    (made[2].square().sum() + made[3].square().sum()).backward()
    assert_bitwise(twin.weight.grad, eager.weight.grad)
    for got, wanted in ((made[2], made[0]), (made[3], made[1]), (y.grad, x.grad)):
        assert_bitwise(got, wanted)


def test_gradients_in_place() -> None:
    eager = te.Linear(HIDDEN, 64, fuse_wgrad_accumulation=True, device="cpu")
    twin = copy.deepcopy(eager)
    for module in (eager, twin):
        module.weight.main_grad = torch.zeros(64, HIDDEN)
    call = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        x = leaf()
        step(call, x, None)
        step(eager, x.detach().clone().requires_grad_(), None)
    assert_bitwise(twin.weight.main_grad, eager.weight.main_grad)
    assert twin.weight.main_grad.any()


def test_gemm_report_counts_eager_calls_alone() -> None:
    layer = te.Linear(HIDDEN, 64, device="cpu")
    te.gemm_report(reset=True)
    torch.compile(layer, backend="aot_eager")(torch.ones(16, HIDDEN))
    assert te.gemm_report(reset=True).counts == {}


def test_rows_from_another_offset_at_each_call() -> None:
    """Strides and offsets become symbols, sizes stay constants."""
    layer = te.Linear(HIDDEN, HIDDEN, device="cpu")
    rows = torch.compile(lambda x, n: layer(x[n : n + 16]), backend="aot_eager")
    x = leaf(64)
    for n in (3, 5, 8):
        assert_bitwise(rows(x, n).detach(), layer(x[n : n + 16]).detach())


def test_groups_of_other_sizes_at_each_call() -> None:
    """Sizes become symbols, some of which tracing then replaces by constants."""
    layer = te.GroupedLinear(3, HIDDEN, HIDDEN, device="cpu")
    grouped = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for sizes in ([16, 16, 16], [0, 16, 32], [8, 8, 32]):
        first, second = leaf(48), leaf(48)
        second.data.copy_(first.data)
        found = [
            step(lambda x, call=call, s=sizes: call(x, s), x, None)
            for call, x in ((grouped, first), (layer, second))
        ]
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)


def gradients(model: torch.nn.Module, call: Any, x: torch.Tensor, autocast: bool) -> list[Any]:
    model.zero_grad()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        y = call(x)
    y.backward(torch.ones_like(y))
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_operators_know_what_autocast_casts(kind: str) -> None:
    """Under autocast the first layer casts input and weights, the second only its weights.

    Layers in bfloat16 without autocast cast nothing.
    """
    build = {"linear": lambda **how: te.Linear(HIDDEN, HIDDEN, device="cpu", **how)}
    build["mlp"] = lambda **how: te.LayerNormMLP(HIDDEN, 64, device="cpu", **how)
    cases = [
        (torch.nn.Sequential(build[kind](), build[kind]()), torch.float32, True),
        (build[kind](params_dtype=torch.bfloat16), torch.bfloat16, False),
    ]
    for model, dtype, autocast in [*cases, *cases[::-1]]:
        x = torch.randn(16, HIDDEN, dtype=dtype, requires_grad=True)
        call = torch.compile(model, backend="aot_eager")
        expected = gradients(model, model, x, autocast)
        for ours, theirs in zip(gradients(model, call, x, autocast), expected, strict=True):
            assert_bitwise(ours, theirs)


@pytest.mark.parametrize("number", [np.float64, np.float32, Fraction])
def test_an_epsilon_of_any_type(number: Any) -> None:
    layer, x = te.LayerNormLinear(HIDDEN, 64, eps=number(0.125), device="cpu"), leaf()
    assert_bitwise(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
