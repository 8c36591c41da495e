"""Delayed scaling: when scales are updated and to which values; saved and copied state."""

import copy
import dataclasses
import gc
import io
import math
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from ranks import FORKED
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.fp8.scaling_state import (
    BACKWARD,
    FORWARD,
    ScalingGroup,
    ScalingState,
)


def linear(device: str, **kwargs) -> te.Linear:
    return te.Linear(32, 16, device=device, params_dtype=torch.float32, **kwargs)


def step(layer, x, recipe, grad=None):
    with te.fp8_autocast(fp8_recipe=recipe):
        y = layer(x)
    if y.requires_grad:
        y.backward(torch.ones_like(y) if grad is None else grad)
    return y


def test_first_step_uses_scale_one_and_later_steps_the_history(device: str) -> None:
    layer, recipe = linear(device), DelayedScaling(amax_history_len=3)
    amaxes = []
    for i in range(5):
        x = torch.randn(16, 32, device=device) * (i + 1)
        state = layer.scaling.get(FORWARD)
        expected = 448.0 / max(amaxes[-3:]) if amaxes else 1.0
        if state is not None:
            assert state.scale[0].item() == pytest.approx(expected, rel=1e-6)
        step(layer, x, recipe)
        amaxes.append(x.abs().max().item())
    history = layer.scaling[FORWARD].amax_history[:, 0].tolist()
    assert history[0] == 0.0
    assert history[1:] == pytest.approx(amaxes[-2:])


def test_gradients_are_updated_at_the_end_of_backward(device: str) -> None:
    layer, recipe = linear(device), DelayedScaling(amax_history_len=4)
    with te.fp8_autocast(fp8_recipe=recipe):
        y = layer(torch.randn(16, 32, device=device))
    assert layer.scaling[BACKWARD].scale[0].item() == 1.0
    y.backward(torch.full_like(y, 0.5))
    assert layer.scaling[BACKWARD].scale[0].item() == 57344.0 / 0.5
    assert layer.scaling[BACKWARD].amax_history[-1, 0].item() == 0.5


def test_a_state_where_a_dead_one_lay_is_updated_itself(device: str) -> None:
    group = ScalingGroup(DelayedScaling(amax_history_len=4), None)
    dead = ScalingState(FORWARD, 1, 4, torch.device(device))
    group.add(dead)
    group.update(FORWARD)
    address, old_scale, old_history = id(dead), dead.scale, dead.amax_history
    del dead
    elsewhere = []
    while id(state := ScalingState(FORWARD, 1, 4, torch.device(device))) != address:
        elsewhere.append(state)
        assert len(elsewhere) < 10_000
    group.add(state)
    state.amax_history[0] = 2.0
    old_history[0] = 7.0
    group.update(FORWARD)
    assert state.scale.item() == 448.0 / 2.0
    assert old_scale.item() == 1.0


def test_margin_format_and_most_recent(device: str) -> None:
    recipe = DelayedScaling(
        margin=2, fp8_format=Format.E4M3, amax_history_len=8, amax_compute_algo="most_recent"
    )
    layer = linear(device)
    for amax in (8.0, 2.0):
        x = torch.zeros(16, 32, device=device)
        x[0, 0] = amax
        y = step(layer, x, recipe)
        assert layer.scaling[FORWARD].scale[0].item() == 448.0 / amax / 4
    assert y.shape == (16, 16)
    assert layer.scaling[BACKWARD].scale[0].item() == 448.0 / 1.0 / 4


def test_callable_algorithms(device: str) -> None:
    def mean(history: torch.Tensor) -> torch.Tensor:
        return history.mean(dim=0)

    def halved(amax, scale, fp8_max, recipe):
        return torch.where(amax > 0, fp8_max / amax / 2, scale)

    layer = linear(device)
    recipe = DelayedScaling(
        amax_history_len=2, amax_compute_algo=mean, scaling_factor_compute_algo=halved
    )
    x = torch.zeros(16, 32, device=device)
    x[0, 0] = 4.0
    step(layer, x, recipe)
    assert layer.scaling[FORWARD].scale[0].item() == 448.0 / 2.0 / 2
    assert layer.scaling[FORWARD].amax_history[:, 0].tolist() == [0.0, 4.0]


def _max(history: torch.Tensor) -> torch.Tensor:
    return history.amax(dim=0)


def _default_scale(amax, scale, fp8_max, recipe):
    # For a Python number, torch computes number * (1 / amax), which is rounded twice.
    new = torch.full_like(amax, fp8_max) / amax / 2.0**recipe.margin
    return torch.where((amax > 0) & amax.isfinite(), new, scale)


@pytest.mark.parametrize(
    ("algorithm", "functions"),
    [
        ("max", {"amax_compute_algo": _max}),
        ("max", {"scaling_factor_compute_algo": _default_scale}),
        ("max", {"amax_compute_algo": _max, "scaling_factor_compute_algo": _default_scale}),
        ("most_recent", {"amax_compute_algo": lambda history: history[0]}),
    ],
    ids=["amax", "scale", "both", "most_recent"],
)
def test_functions_that_compute_the_default_equal_it(device: str, algorithm, functions) -> None:
    """Bit for bit, also where a module did not run and where an amax is NaN, infinite or tiny."""
    default = DelayedScaling(margin=1, amax_history_len=3, amax_compute_algo=algorithm)
    pairs = [(default, linear(device), linear(device))]
    pairs.append((dataclasses.replace(default, **functions), *copy.deepcopy(pairs[0][1:])))
    odd = {2: (math.nan, 5.0), 3: (math.inf, math.nan), 5: (1e-42, math.nan)}
    for i in range(8):
        x = torch.randn(16, 32, device=device) * 2.0**i
        for recipe, first, second in pairs:
            with te.fp8_autocast(fp8_recipe=recipe):
                y = first(x) if i % 3 == 1 else first(x) + second(x)
                for column, amax in enumerate(odd.get(i, ())):
                    first.scaling[FORWARD].amax_history[0, column] = amax
            y.backward(torch.ones_like(y))
        for module, other in zip(*(modules for _, *modules in pairs), strict=True):
            for direction, state in module.scaling.items():
                assert_bitwise(state.scale, other.scaling[direction].scale)
                assert_bitwise(state.amax_history, other.scaling[direction].amax_history)


@pytest.mark.parametrize("function", ["amax_compute_algo", "scaling_factor_compute_algo"])
def test_functions_leave_modules_alone_that_did_not_run(device: str, function: str) -> None:
    own = {
        "amax_compute_algo": lambda history: history.mean(dim=0),
        "scaling_factor_compute_algo": lambda amax, scale, fp8_max, recipe: 2 * scale,
    }
    recipe = DelayedScaling(amax_history_len=3, **{function: own[function]})
    one, two = linear(device), linear(device)
    x = torch.randn(16, 32, device=device)
    step(one, x, recipe)
    step(two, x, recipe)
    before = copy.deepcopy(two.scaling[FORWARD])
    step(one, 2 * x, recipe)
    assert_bitwise(two.scaling[FORWARD].scale, before.scale)
    assert_bitwise(two.scaling[FORWARD].amax_history, before.amax_history)


def test_a_module_that_did_not_run_keeps_its_history(device: str) -> None:
    recipe = DelayedScaling(amax_history_len=3)
    one, two = linear(device), linear(device)
    x = torch.randn(16, 32, device=device)
    step(one, x, recipe)
    step(two, x, recipe)
    before = two.scaling[FORWARD].amax_history.clone()
    step(one, 2 * x, recipe)
    assert torch.equal(two.scaling[FORWARD].amax_history, before)


def test_no_grad_and_evaluation_leave_no_trace(device: str) -> None:
    layer, recipe = linear(device), DelayedScaling(amax_history_len=3)
    x = torch.randn(16, 32, device=device)
    step(layer, x, recipe)
    before = copy.deepcopy(layer.scaling[FORWARD])
    with torch.no_grad():
        step(layer, 10 * x, recipe)
    assert torch.equal(layer.scaling[FORWARD].scale, before.scale)
    assert torch.equal(layer.scaling[FORWARD].amax_history, before.amax_history)
    layer.eval()
    step(layer, 10 * x, recipe)  # with gradients, eval() updates scales too
    assert not torch.equal(layer.scaling[FORWARD].scale, before.scale)


def test_training_after_a_first_call_in_inference_mode(device: str) -> None:
    """Lightning's sanity check makes such a call. Compiled graphs save the state for backward."""
    layer, recipe = linear(device), DelayedScaling(amax_history_len=4)
    x = torch.ones(16, 32, device=device)
    for length in (4, 6):
        with torch.inference_mode():
            step(layer, x, DelayedScaling(amax_history_len=length))
        assert not any(state.room.is_inference() for state in layer.scaling.values())
    step(torch.compile(layer, backend="aot_eager"), x, recipe)


def test_running_twice_in_a_scope_keeps_the_maximum(device: str) -> None:
    layer, recipe = linear(device), DelayedScaling(amax_history_len=3)
    x = torch.ones(16, 32, device=device)
    with te.fp8_autocast(fp8_recipe=recipe):
        layer(3 * x)
        layer(x)
        assert layer.scaling[FORWARD].amax_history[0, 0].item() == 3.0
    assert layer.scaling[FORWARD].amax_history[-1, 0].item() == 3.0


def test_nested_scopes(device: str) -> None:
    outer, inner = DelayedScaling(amax_history_len=3), Float8CurrentScaling()
    a, b, c = linear(device), linear(device), linear(device)
    x = torch.randn(16, 32, device=device)
    te.gemm_report(reset=True)
    with te.fp8_autocast(fp8_recipe=outer):
        a(x)
        with te.fp8_autocast(enabled=False):
            b(x)
        with te.fp8_autocast(fp8_recipe=inner):
            c(x)
        assert a.scaling[FORWARD].amax_history[0, 0].item() > 0  # not updated by inner exits
        a(x)
    assert a.scaling[FORWARD].amax_history[0, 0].item() == 0
    assert not b.scaling and not c.scaling
    assert te.gemm_report().total("fp8") == 3 and te.gemm_report().total("fp32") == 1


def test_state_is_restored_when_the_region_raises() -> None:
    with pytest.raises(RuntimeError, match="inside"), te.fp8_autocast():
        raise RuntimeError("inside")
    assert not autocast_stack().scope.enabled and not autocast_stack().outer


def test_calibration_makes_scales_ready_at_exit(device: str) -> None:
    layer = linear(device)
    x = torch.randn(16, 32, device=device)
    te.gemm_report(reset=True)
    with torch.no_grad(), te.fp8_autocast(enabled=False, calibrating=True):
        y = layer(x)
    assert te.gemm_report().total("fp8") == 0
    assert torch.equal(y, layer(x).detach())
    scale = layer.scaling[FORWARD].scale
    assert scale[0].item() == pytest.approx(448.0 / x.abs().max().item(), rel=1e-6)
    assert scale[1].item() == pytest.approx(448.0 / layer.weight.abs().max().item(), rel=1e-6)
    assert layer.get_extra_state().numel() > 0


def test_changing_the_history_length_keeps_the_newest_rows() -> None:
    state = ScalingState(FORWARD, 1, 5, torch.device("cpu"))
    state.amax_history.copy_(torch.tensor([[9.0], [1.0], [2.0], [3.0], [4.0]]))
    state.fit(3, torch.device("cpu"))
    assert state.amax_history[:, 0].tolist() == [9.0, 3.0, 4.0]
    state.fit(6, torch.device("cpu"))
    assert state.amax_history[:, 0].tolist() == [9.0, 0.0, 0.0, 0.0, 3.0, 4.0]
    state.fit(1, torch.device("cpu"))
    assert state.amax_history[:, 0].tolist() == [9.0]


def test_dead_modules_leave_the_update(device: str) -> None:
    recipe = DelayedScaling(amax_history_len=3)
    keep, drop = linear(device), linear(device)
    x = torch.randn(16, 32, device=device)
    with te.autocast(recipe=recipe):
        keep(x), drop(x)
    members = keep.scaling[FORWARD].group.members[FORWARD]
    assert len(members.alive()) == 2
    del drop
    gc.collect()
    step(keep, x, recipe)
    assert len(members.alive()) == 1


def test_zero_tokens_change_nothing(device: str) -> None:
    layer, recipe = linear(device), DelayedScaling(amax_history_len=3)
    step(layer, torch.randn(16, 32, device=device), recipe)
    before = copy.deepcopy(layer.scaling)
    x = torch.randn(0, 32, device=device, requires_grad=True)
    y = step(layer, x, recipe)
    assert y.shape == (0, 16) and x.grad.shape == (0, 32)
    assert torch.equal(
        layer.scaling[FORWARD].amax_history[:, 0], before[FORWARD].amax_history[:, 0]
    )
    assert torch.equal(layer.scaling[BACKWARD].scale, before[BACKWARD].scale)


def test_extra_state_round_trip_is_exact_and_needs_no_pickle(device: str) -> None:
    recipe = DelayedScaling(amax_history_len=3)
    source, target = linear(device), linear(device)
    x = torch.randn(16, 32, device=device)
    for i in range(3):
        step(source, x * (i + 1), recipe)
    state = source.state_dict()
    assert state["_extra_state"].dtype == torch.uint8
    target.load_state_dict(state)
    for direction in (FORWARD, BACKWARD):
        a, b = source.scaling[direction], target.scaling[direction]
        assert torch.equal(a.scale.cpu(), b.scale.cpu())
        assert torch.equal(a.amax_history.cpu(), b.amax_history.cpu())
    assert torch.equal(step(source, x, recipe), step(target, x, recipe))


def test_extra_state_of_others() -> None:
    layer = linear("cpu")
    with pytest.warns(UserWarning, match="ignoring the _extra_state of another package"):
        layer.set_extra_state(torch.arange(64, dtype=torch.uint8))


def test_extra_state_of_another_kind_of_layer_is_refused() -> None:
    linear, mlp = te.Linear(32, 32, device="cpu"), te.LayerNormMLP(32, 32, device="cpu", name="mlp")
    with te.fp8_autocast(enabled=True):
        linear(torch.randn(16, 32)).sum().backward()
    state = {**mlp.state_dict(), "_extra_state": linear.get_extra_state()}
    text = r"expected the FP8 state of 2 GEMMs, 6 forward scales, got 3 \(layer mlp\)"
    with pytest.raises(RuntimeError, match=text):
        mlp.load_state_dict(state)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_damaged_scales_are_refused(scale: float) -> None:
    layer = te.Linear(32, 32, device="cpu", name="fc")
    with te.fp8_autocast(enabled=True):
        layer(torch.randn(16, 32)).sum().backward()
    raw = layer.get_extra_state()
    raw[20:24] = torch.tensor([scale]).view(torch.uint8)  # the first scale, after the header
    with pytest.raises(ValueError, match=r"scales above 0 and finite, got .* \(layer fc\)"):
        layer.set_extra_state(raw)


def test_extra_state_may_be_missing() -> None:
    layer = linear_with_state()
    before = layer.get_extra_state()
    plain = {k: v for k, v in layer.state_dict().items() if k != "_extra_state"}
    with pytest.warns(UserWarning, match=r"'_extra_state', which is missing: scales stay"):
        layer.load_state_dict(plain)
    assert torch.equal(layer.get_extra_state(), before)
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({})


def linear_with_state() -> te.Linear:
    layer = linear("cpu")
    step(layer, torch.randn(16, 32), DelayedScaling(amax_history_len=3))
    return layer


def test_copies_have_state_of_their_own() -> None:
    layer = linear_with_state()
    twin = copy.deepcopy(layer)
    recipe = DelayedScaling(amax_history_len=3)
    step(twin, 100 * torch.randn(16, 32), recipe)
    assert twin.scaling[FORWARD].scale[0] < layer.scaling[FORWARD].scale[0]
    assert twin.scaling[FORWARD].amax_history[0].tolist() == [0.0, 0.0, 0.0]


def test_modules_may_be_pickled_whole() -> None:
    """A model is saved after a step, and a loaded copy continues like the original."""
    recipe = DelayedScaling(amax_history_len=3, fp8_dpa=True)
    modules = (te.Linear(32, 32, device="cpu"), te.DotProductAttention(2, 16))
    inputs = ([torch.randn(16, 32)], [torch.randn(8, 2, 2, 16) for _ in range(3)])
    for module, tensors in zip(modules, inputs, strict=True):
        x = [t.requires_grad_() for t in tensors]
        with te.fp8_autocast(fp8_recipe=recipe):
            module(*x).sum().backward()
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for one in (module, loaded):
            with te.fp8_autocast(fp8_recipe=recipe):
                one(*x).square().sum().backward()
        for direction, state in module.scaling.items():
            assert torch.equal(loaded.scaling[direction].scale, state.scale)
            assert torch.equal(loaded.scaling[direction].amax_history, state.amax_history)


def test_modules_go_to_other_processes(device: str) -> None:
    layer, recipe = linear(device), DelayedScaling(amax_history_len=3)
    for size in (1.0, 3.0):
        step(layer, size * torch.randn(16, 32, device=device), recipe)
    process = FORKED.Process(target=layer.cpu().get_extra_state)
    process.start()
    process.join()
    assert process.exitcode == 0
    sent = pickle.loads(ForkingPickler.dumps(layer.scaling[FORWARD]))
    assert torch.equal(sent.amax_history, layer.scaling[FORWARD].amax_history.cpu())


def test_state_on_meta_may_be_pickled() -> None:
    state = pickle.loads(pickle.dumps(ScalingState(FORWARD, 3, 4, torch.device("meta"))))
    assert state.room.is_meta and state.amax_history.shape == (4, 3)
