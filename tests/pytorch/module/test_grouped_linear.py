"""`GroupedLinear` computes what a separate Linear computes for each part of the rows."""

import copy
import inspect

import numpy as np
import pytest
import torch
from recordings import recordings_made
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

SPLITS = [24, 0, 9]
RECIPES = {
    "plain": None,
    "delayed": DelayedScaling(amax_history_len=2),
    "current": Float8CurrentScaling(),
}


def pair(device: str, **arguments: object) -> tuple[te.GroupedLinear, list[te.Linear]]:
    grouped = te.GroupedLinear(len(SPLITS), 32, 48, device=device, **arguments)
    apart = [te.Linear(32, 48, device=device, **arguments) for _ in SPLITS]
    with torch.no_grad():
        for i, linear in enumerate(apart):
            for name, parameter in linear.named_parameters():
                parameter.copy_(getattr(grouped, f"{name}{i}"))
    return grouped, apart


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("bias", [True, False])
def test_each_part_is_a_linear(recipe: object, bias: bool, device: str) -> None:
    grouped, apart = pair(device, bias=bias, params_dtype=torch.bfloat16)
    for _ in range(3):  # scales change from step to step
        x = torch.randn(sum(SPLITS), 32, device=device, dtype=torch.bfloat16)
        upstream = torch.randn(sum(SPLITS), 48, device=device, dtype=torch.bfloat16)
        first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            out = grouped(first, SPLITS)
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            parts = zip(apart, second.split(SPLITS), strict=True)
            expected = torch.cat([linear(rows) for linear, rows in parts])
        assert_bitwise(out, expected)
        out.backward(upstream)
        expected.backward(upstream)
        assert_bitwise(first.grad, second.grad)
        for i, linear in enumerate(apart):
            for name, parameter in linear.named_parameters():
                assert_bitwise(getattr(grouped, f"{name}{i}").grad, parameter.grad)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_numbers_of_rows_that_repeat_are_recorded(
    recipe: object, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts run as one node. After a few shapes, only those that often repeat are recorded."""
    grouped = te.GroupedLinear(2, 32, 48, device=device, params_dtype=torch.bfloat16)
    made = recordings_made(monkeypatch)

    def step(first: int) -> int:
        made.clear()
        x = torch.randn(192, 32, device=device, dtype=torch.bfloat16)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            out = grouped(x, [first, 192 - first])
        (cat,) = [node for node, _ in out.grad_fn.next_functions]
        assert len({node for node, _ in cat.next_functions}) == 1
        out.sum().backward()
        return len(made)

    assert [step(16), step(16), step(32)] == [2, 0, 2]
    assert [step(16 * i) for i in range(3, 8)] == [2, 2, 0, 0, 0]
    assert sum([step(80) for _ in range(8)]) == 2


def test_biases_are_returned(device: str) -> None:
    grouped, apart = pair(device, return_bias=True)
    x = torch.randn(sum(SPLITS), 32, device=device)
    out, biases = grouped(x, torch.tensor(SPLITS))
    assert [bias.shape for bias in biases] == [(48,)] * 3
    parts = zip(apart, x.split(SPLITS), strict=True)
    assert_bitwise(out, torch.cat([linear(rows)[0] for linear, rows in parts]))


def test_checkpoints(device: str) -> None:
    """Keys, shapes and order of state dicts, with one entry for the FP8 state of all parts."""
    source, target = (te.GroupedLinear(3, 32, 48, device=device) for _ in range(2))
    x = torch.randn(sum(SPLITS), 32, device=device)
    with te.fp8_autocast():
        source(x, SPLITS).sum().backward()
    state = source.state_dict()
    weights, biases = ([f"{kind}{i}" for i in range(3)] for kind in ("weight", "bias"))
    assert list(state) == [*weights, *biases, "_extra_state"]
    assert state["weight1"].shape == (48, 32) and state["bias2"].shape == (48,)
    repeated = {f"_extra_state{i}": state["_extra_state"] for i in (1, 2)}  # Megatron adds them
    assert not source.fp8_meta["fp8_checkpoint"]  # if True, Megatron would unpickle the state
    target.load_state_dict({**state, **repeated})
    assert_bitwise(target.get_extra_state(), source.get_extra_state())
    with torch.no_grad(), te.fp8_autocast():
        assert_bitwise(target(x, SPLITS), source(x, SPLITS))


def test_follows_what_happens_to_its_parameters(device: str) -> None:
    grouped = te.GroupedLinear(2, 32, 48, device="meta")
    assert grouped.weight0.is_meta
    with torch.device(device):
        grouped.reset_parameters()
    assert grouped.weight0.std().item() == pytest.approx(0.023, rel=0.2)
    grouped = grouped.to(device).to(torch.bfloat16)
    x = torch.ones(16, 32, device=device, dtype=torch.bfloat16)
    before = grouped(x, [8, 8])
    assert before.dtype is torch.bfloat16
    twin = copy.deepcopy(grouped)
    with torch.no_grad():
        twin.weight1.zero_()
        twin.bias1.zero_()
    after = twin(x, [8, 8])
    assert_bitwise(after[:8], before[:8])
    assert not after[8:].any() and before[8:].any()
    grouped.weight0 = torch.nn.Parameter(torch.zeros_like(grouped.weight0))
    assert not grouped(x, [8, 8])[:8].any()


def test_weights_kept_in_fp8(device: str) -> None:
    with te.fp8_model_init(enabled=True):
        grouped = te.GroupedLinear(2, 32, 48, device=device)
    assert all(isinstance(weight, te.Float8Tensor) for weight in (grouped.weight0, grouped.weight1))
    x = torch.randn(32, 32, device=device)
    optimizer = torch.optim.SGD(grouped.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        with te.fp8_autocast():
            loss = (grouped(x, [16, 16]) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    state = grouped.state_dict()
    assert type(state["weight1"]) is torch.Tensor
    again = te.GroupedLinear(2, 32, 48, device=device)
    again.load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "value"),
    [("fuse_wgrad_accumulation", True), ("save_original_input", True), ("parallel_mode", "row")],
)
def test_settings_are_those_of_the_next_call(name: str, value: object) -> None:
    made = te.GroupedLinear(3, 32, 48, device="cpu", **{name: value})
    late = te.GroupedLinear(3, 32, 48, device="cpu")
    late.load_state_dict(made.state_dict())
    setattr(late, name, value)
    x, results = torch.randn(sum(SPLITS), 32), []
    for grouped in (made, late):
        assert [getattr(one, name) for one in (grouped, *grouped.parts())] == [value] * 4
        for parameter in grouped.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        with te.autocast(recipe=Float8CurrentScaling()):
            y = grouped(x, SPLITS)
        y.sum().backward()
        assert (grouped.weight0.grad is None) == (name == "fuse_wgrad_accumulation")
        results.append([y, grouped.weight0.main_grad])
    for ours, theirs in zip(*results, strict=True):
        assert_bitwise(ours, theirs)


@pytest.mark.parametrize("name", ["return_bias", "delay_wgrad_compute"])
def test_settings_that_stay(name: str) -> None:
    grouped = te.GroupedLinear(2, 16, 16, device="cpu", name="experts")
    text = rf"^\[GroupedLinear\] expected {name}=False to stay, .* got True \(layer experts"
    with pytest.raises(ValueError, match=text):
        setattr(grouped, name, True)
    assert getattr(grouped, name) is False
    assert grouped(torch.ones(4, 16), [2, 2]).shape == (4, 16)


def test_sums_of_outputs_have_each_bias_once() -> None:
    arguments: dict = {"device": "cpu", "tp_size": 2}
    with pytest.raises(ValueError, match="expected bias=False or return_bias=True with parallel_m"):
        te.GroupedLinear(2, 16, 16, parallel_mode="row", **arguments)
    grouped = te.GroupedLinear(2, 16, 16, **arguments)
    with pytest.raises(ValueError, match="the sum over 2 ranks would have each bias as often"):
        grouped.parallel_mode = "row"
    assert grouped.parallel_mode is None


def test_names_of_parts(device: str) -> None:
    grouped = te.GroupedLinear(2, 16, 16, device=device, name="experts")
    te.gemm_report(reset=True)
    grouped(torch.ones(4, 16, device=device), [2, 2])
    grouped.name = "moe.fc1"
    grouped(torch.ones(4, 16, device=device), [2, 2])
    layers = {layer for layer, _, _ in te.gemm_report().counts}
    assert layers == {f"{name}.gemm_{i}" for name in ("experts", "moe.fc1") for i in range(2)}
    assert repr(grouped).startswith("GroupedLinear(num_gemms=2, in_features=16, out_features=16")


def test_a_frozen_part_may_have_a_history_of_another_length() -> None:
    grouped, x = te.GroupedLinear(2, 32, 16, device="cpu"), torch.ones(32, 32)
    for length in (4, 6):
        with te.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=length)):
            grouped(x, [16, 16]).sum().backward()
        grouped.weight0.requires_grad_(False)
        grouped.bias0.requires_grad_(False)
    again = te.GroupedLinear(2, 32, 16, device="cpu")
    again.load_state_dict(grouped.state_dict())
    for direction, state in grouped.scaling.items():
        assert_bitwise(again.scaling[direction].amax_history, state.amax_history)


@pytest.mark.parametrize("bias", [True, False])
def test_replicas_run_at_the_same_time(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of `torch.nn.DataParallel` run replicas at the same time."""
    grouped = te.GroupedLinear(3, 32, 16, bias=bias, device="cpu")
    x, lend = torch.randn(sum(SPLITS), 32), te.GroupedLinear._lend
    replicas = [grouped._replicate_for_data_parallel() for _ in range(2)]
    for factor, replica in enumerate(replicas, 1):
        for name, parameter in grouped._parameters.items():
            setattr(replica, name, None if parameter is None else parameter.detach() * factor)

    def interrupted(self: te.GroupedLinear) -> None:
        lend(self)
        if self is replicas[0]:
            replicas[1](x, SPLITS)

    monkeypatch.setattr(te.GroupedLinear, "_lend", interrupted)
    assert_bitwise(replicas[0](x, SPLITS), grouped(x, SPLITS).detach())


def test_refusals() -> None:
    grouped = te.GroupedLinear(2, 16, 16, device="cpu", name="experts")
    x = torch.ones(4, 16)
    for splits in ([4], [2, 3], [5, -1]):
        with pytest.raises(ValueError, match=r"2 numbers of rows .* up to 4, got .*layer experts"):
            grouped(x, splits)
    fp8 = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)(x)
    with pytest.raises(TypeError, match="inp in high precision, got Float8Tensor"):
        grouped(fp8, [2, 2])
    with pytest.raises(ValueError, match="num_gemms >= 1, got 0"):
        te.GroupedLinear(0, 16, 16)
    with pytest.raises(TypeError, match=r"^GroupedLinear\(\) got unexpected .* colour$"):
        te.GroupedLinear(2, 32, 16, colour="red")
    with pytest.raises(TypeError, match="unexpected keyword argument parameters_split"):
        te.GroupedLinear(2, 16, 16, parameters_split=("a", "b"))


def test_keywords_of_parameters_in_one_tensor() -> None:
    """Their defaults are taken; programs look in the signature whether others are possible."""
    defaults = {"single_grouped_weight": False, "single_grouped_bias": False}
    grouped = te.GroupedLinear(2, 16, 16, use_grouped_tensor=None, device="cpu", **defaults)
    names = ["weight0", "weight1", "bias0", "bias1"]
    assert [name for name, _ in grouped.named_parameters()] == names
    assert inspect.signature(te.GroupedLinear).parameters.keys().isdisjoint(defaults)
    for name in (*defaults, "use_grouped_tensor"):
        with pytest.raises(
            NotImplementedError, match=rf"expected {name}=.* got True \(layer moe\)"
        ):
            te.GroupedLinear(2, 16, 16, name="moe", **{name: True})


@pytest.mark.parametrize("make", [np.array, torch.tensor, lambda s: [*map(np.int64, s)], tuple])
def test_numbers_of_rows_of_any_library(make: object) -> None:
    grouped, _ = pair("cpu")
    x = torch.randn(sum(SPLITS), 32)
    assert_bitwise(grouped(x, make(SPLITS)), grouped(x, SPLITS))


@pytest.mark.parametrize("wrong", [None, 33, [24.0, 0.0, 9.0]])
def test_what_are_no_numbers_of_rows(wrong: object) -> None:
    grouped, _ = pair("cpu")
    with pytest.raises(TypeError, match=r"^\[GroupedLinear\] expected m_splits to be ints, got"):
        grouped(torch.randn(sum(SPLITS), 32), wrong)
