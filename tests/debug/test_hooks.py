"""Calls of feature methods: their order and arguments, and the effect of their answers."""

import pytest
import torch
from fake_manager import session
from hook_cases import MODULES, HighPrecision, Modifier, Recorder, build, train
from precisions import RECIPES, scope
from rulers import assert_equal

import transformer_engine.pytorch as te


@pytest.mark.parametrize("tokens", [(4, 8), (3, 7)], ids=["aligned", "odd"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_looking_changes_no_bit(device: str, name: str, recipe: str, tokens) -> None:
    expected = train(build(name, device), RECIPES[recipe], tokens)
    recorder = Recorder()
    with session(("layer", recorder, {})) as s:
        actual = train(build(name, device), RECIPES[recipe], tokens, after_step=s.step)
    assert_equal(actual, expected)
    looks = [c for c in recorder.calls if c[0] == "inspect"]
    assert len(looks) == 2 * 6 * (2 if "mlp" in name else 1)
    assert all(
        c[3][:-1] in ((*tokens,), (tokens[0] * tokens[1],))
        for c in looks
        if c[2] not in ("weight", "wgrad")
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_order_of_calls(recipe: str) -> None:
    recorder = Recorder()
    with session(("layer", recorder, {})):
        train(build("linear", "cpu"), RECIPES[recipe], steps=1)
    looks = [c for c in recorder.calls if c[0] == "inspect?"]
    order = ["activation", "weight", "output", "dgrad", "wgrad", "gradient"]
    assert [c[2] for c in looks] == order
    seen = [c[:1] + c[2:4] for c in recorder.calls if c[0] != "inspect?"]

    def operand(name, shape, *gemms):
        after = [("after", name, g) for g in gemms] if recipe != "high precision" else []
        return [("inspect", name, shape), *after]

    assert seen == [
        *operand("activation", (4, 8, 32), "fprop", "wgrad"),
        *operand("weight", (48, 32), "fprop", "dgrad"),
        ("inspect", "output", (4, 8, 48)),
        *operand("gradient", (4, 8, 48), "dgrad", "wgrad"),
        ("inspect", "dgrad", (4, 8, 32)),
        ("inspect", "wgrad", (48, 32)),
    ]


def test_results_that_a_feature_modified_are_shown_once_more() -> None:
    recorder = Recorder()
    results = {"tensors": ["output", "dgrad"]}
    with session(("layer", recorder, {}), ("layer", Modifier(), results)):
        train(build("linear", "cpu"), RECIPES["delayed"], steps=1)
    seen = [(c[0], c[2]) for c in recorder.calls if c[2] in ("output", "dgrad", "wgrad")]
    assert [s for s in seen if s[0] != "inspect?"] == [
        ("inspect", "output"),
        ("after", "output"),
        ("inspect", "dgrad"),
        ("after", "dgrad"),
        ("inspect", "wgrad"),
    ]
    assert [c[3] for c in recorder.calls if c[0] == "after"] == ["fprop", "dgrad"]


def test_mlp_names_both_gemms_each_way() -> None:
    recorder = Recorder()
    with session(("layer", recorder, {})):
        train(build("mlp", "cpu"), RECIPES["delayed"], steps=1)
    assert [c[1:3] for c in recorder.calls if c[0] == "inspect"] == [
        ("layer.fc1", "activation"),
        ("layer.fc1", "weight"),
        ("layer.fc1", "output"),
        ("layer.fc2", "activation"),
        ("layer.fc2", "weight"),
        ("layer.fc2", "output"),
        ("layer.fc2", "gradient"),
        ("layer.fc2", "dgrad"),
        ("layer.fc2", "wgrad"),
        ("layer.fc1", "gradient"),
        ("layer.fc1", "dgrad"),
        ("layer.fc1", "wgrad"),
    ]


def test_layer_without_features_keeps_its_plan_and_asks_once() -> None:
    recorder = Recorder()
    with session(("elsewhere", recorder, {})) as s:
        module = build("norm linear", "cpu")
        train(module, RECIPES["delayed"], steps=3, after_step=s.step)
        (plan,) = module._plans.values()
        assert plan.inspection.first is None and plan.inspect_at > s.inspector.tick + 1000
    assert not recorder.calls
    assert s.plans == [
        f"layer: Tensor: {tensor}, gemm {gemm} - FP8 quantization"
        for tensor, gemms in (
            ("activation", ("fprop", "wgrad")),
            ("weight", ("fprop", "dgrad")),
            ("gradient", ("dgrad", "wgrad")),
        )
        for gemm in gemms
    ]


def test_one_gemm_in_high_precision() -> None:
    module = build("linear", "cpu")
    te.gemm_report(reset=True)
    with session(("layer", HighPrecision(), {"gemms": ["wgrad"]})) as s:
        train(module, RECIPES["current"], steps=1)
    counts = te.gemm_report().counts
    assert counts == {
        ("layer", "fprop", "fp8"): 1,
        ("layer", "dgrad", "fp8"): 1,
        ("layer", "wgrad", "bf16"): 1,
    }
    assert [p for p in s.plans if "High precision" in p] == [
        "layer: Tensor: activation, gemm wgrad - High precision",
        "layer: Tensor: gradient, gemm wgrad - High precision",
    ]


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("name", MODULES)
def test_every_gemm_in_high_precision_is_a_run_without_fp8(name: str, recipe: str) -> None:
    expected = train(build(name, "cpu"), None)
    with session(("layer", HighPrecision(), {})) as s:
        actual = train(build(name, "cpu"), RECIPES[recipe], after_step=s.step)
    assert_equal(actual, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_modified_operands_reach_their_gemm(recipe: str) -> None:
    modifier = Modifier()
    config = {"tensors": ["activation"], "gemms": ["fprop"]}
    plain = build("linear", "cpu")
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    with (
        session(("layer", modifier, config)),
        scope(recipe),
    ):
        y = plain(x)
    assert modifier.calls == [("activation", "fprop", False)]
    assert torch.equal(y, torch.nn.functional.linear(x * 2, plain.weight, plain.bias))


def test_modified_results() -> None:
    modifier = Modifier()
    config = {"tensors": ["output", "dgrad", "wgrad"]}
    plain = train(build("linear", "cpu"), None, steps=1)
    with session(("layer", modifier, config)):
        y, dx, dw, db = train(build("linear", "cpu"), None, steps=1)
    assert_equal([y, dx, dw, db], [plain[0] * 2, plain[1] * 2, plain[2] * 2, plain[3]])
    assert modifier.calls == [
        ("output", "fprop", False),
        ("dgrad", "dgrad", False),
        ("wgrad", "wgrad", False),
    ]


def test_modified_gradient_leaves_the_bias_gradient_alone() -> None:
    plain = train(build("linear", "cpu"), None, steps=1)
    with session(("layer", Modifier(), {"tensors": ["gradient"]})):
        y, dx, dw, db = train(build("linear", "cpu"), None, steps=1)
    assert_equal([y, dx, dw], [plain[0], plain[1] * 2, plain[2] * 2])
    torch.testing.assert_close(db, plain[3])


def test_operands_of_two_kinds_name_layer_and_gemm() -> None:
    class OnlyActivation(Modifier):
        fp8_gemm_enabled = None

        def __getattribute__(self, name):
            if name == "fp8_gemm_enabled":
                raise AttributeError(name)
            return super().__getattribute__(name)

    with (
        session(("layer", OnlyActivation(), {"tensors": ["activation"], "gemms": ["fprop"]})),
        pytest.raises(TypeError, match=r"fprop.*torch.bfloat16 and FP8 .layer layer"),
    ):
        train(build("linear", "cpu"), RECIPES["current"], steps=1)


def test_a_feature_that_says_when_next_is_left_alone_until_then() -> None:
    """(True, n) holds for this iteration, and the next question is at n; (True, None) ends it."""

    class Seldom(Modifier):
        def inspect_tensor_enabled(self, config, tensor_name, iteration):
            self.calls.append(("asked", iteration))
            return tensor_name == "activation", iteration + 3

        def inspect_tensor(self, config, tensor, iteration):
            self.calls.append(("looked", iteration))

        def modify_tensor_enabled(self, config, iteration):
            return True, None

        def fp8_gemm_enabled(self, config, iteration):
            return False, 2

    feature, fp8 = Seldom(), []
    with session(("layer", feature, {"tensors": ["activation"], "gemms": ["fprop"]})) as s:
        module = build("linear", "cpu")
        for _ in range(5):
            te.gemm_report(reset=True)
            with te.fp8_autocast():
                module(torch.ones(16, 32, dtype=torch.bfloat16))
            fp8.append(te.gemm_report().total("fp8"))
            s.step()
    of_kind = {kind: [c[1] for c in feature.calls if c[0] == kind] for kind in ("asked", "looked")}
    assert of_kind == {"asked": [0, 3], "looked": [0, 3]}
    assert [c for c in feature.calls if c[0] == "activation"] == [("activation", "fprop", False)]
    assert fp8 == [0, 0, 0, 0, 0], "what fp8_gemm_enabled says holds"
