"""Which calls put a module's scales into the group of a recipe."""

import copy

import pytest
import torch
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, scaling_state

BETWEEN = {
    "disabled": (True, {"enabled": False}),
    "disabled, nothing recorded": (False, {"enabled": False}),
    "evaluation": (False, {"fp8_recipe": DelayedScaling(amax_history_len=4, margin=1)}),
    "evaluation, another history": (False, {}),
}


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("between", BETWEEN)
def test_calls_that_leave_no_amax_between_forward_and_backward(between, nested, device) -> None:
    """The recipe of such a call does not take part in the update of scales."""
    recorded, arguments = BETWEEN[between]
    torch.manual_seed(0)
    layer = te.Linear(32, 16, device=device)
    recipe = DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3)
    twin = copy.deepcopy(layer)

    def call_between(x):
        with torch.set_grad_enabled(recorded), te.fp8_autocast(**arguments):
            twin(x)

    for _ in range(3):
        x = torch.randn(16, 32, device=device)
        grad = torch.full((16, 16), 1e-4, device=device)
        with te.fp8_autocast(fp8_recipe=recipe):
            expected = layer(x)
        expected.backward(grad)
        with te.fp8_autocast(fp8_recipe=recipe):
            y = twin(x)
            if nested:
                call_between(x)
        if not nested:
            call_between(x)
        y.backward(grad)
    assert_bitwise(twin.weight.grad, layer.weight.grad)
    for direction, state in layer.scaling.items():
        assert_bitwise(twin.scaling[direction].scale, state.scale)
        assert_bitwise(twin.scaling[direction].amax_history, state.amax_history)


def test_a_step_updates_states_that_a_later_one_has_put_into_its_group(device) -> None:
    """In pipelines, the backward of a step may run after the forwards of a later step."""
    torch.manual_seed(0)
    first, second = (te.Linear(32, 32, device=device) for _ in range(2))
    x, recipe = torch.randn(16, 32, device=device), DelayedScaling(amax_history_len=4)
    with te.fp8_autocast(fp8_recipe=recipe):
        with torch.no_grad():
            hidden = first(x)
        y = second(hidden)
    with te.fp8_autocast(fp8_recipe=recipe):
        later = second(first(x))
    y.backward(torch.full_like(y, 0.5))
    assert second.scaling["backward"].scale[0] == 57344.0 / 0.5
    later.backward(torch.full_like(later, 0.25))
    assert second.scaling["backward"].amax_history[-2:, 0].tolist() == [0.5, 0.25]
    assert first.scaling["backward"].scale[0] != 1.0


@pytest.mark.gpu
def test_layers_on_two_devices_keep_a_table_each(monkeypatch) -> None:
    """A model on several devices does not build its tables again in every step."""
    entries = []
    entry = scaling_state.entry
    monkeypatch.setattr(scaling_state, "entry", lambda *one: entries.append(one) or entry(*one))
    layers = [te.Linear(32, 32, device=device) for device in ("cpu", "cuda")]
    for _ in range(3):
        x = torch.randn(16, 32)
        with te.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=4)):
            for layer in layers:
                x = layer(x.to(layer.weight.device))
        x.sum().backward()
    assert len(entries) == 4  # two layers, two directions
    for layer in layers:
        assert layer.scaling["forward"].scale[0] != 1.0


def test_a_layer_that_ran_before_a_reset_runs_in_the_scopes_after_it(device) -> None:
    layer, x = te.Linear(32, 16, device=device), torch.ones(16, 32, device=device)
    with te.fp8_autocast(enabled=False):
        layer(x)
    FP8GlobalStateManager.reset()
    with te.fp8_autocast():
        layer(x)
    assert te.gemm_report().total("fp8") == 1
