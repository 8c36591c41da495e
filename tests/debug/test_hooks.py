"""The calls that features get, in which order, with what, and what comes of the answers."""

import pytest
import torch
from debug.fake_manager import session

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)

RECIPES = {
    "high precision": None,
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
}
MODULES = {
    "linear": lambda **k: te.Linear(32, 48, **k),
    "norm linear": lambda **k: te.LayerNormLinear(32, 48, **k),
    "mlp": lambda **k: te.LayerNormMLP(32, 64, **k),
    "swiglu mlp": lambda **k: te.LayerNormMLP(
        32, 64, activation="swiglu", normalization="RMSNorm", **k
    ),
}


class Recorder:
    """Looks at everything and changes nothing."""

    def __init__(self) -> None:
        self.calls = []

    def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration):
        self.calls.append(("inspect?", layer_name, tensor_name, iteration))
        return True

    def inspect_tensor_postquantize_enabled(self, config, layer_name, tensor_name, gemm, iteration):
        return True, iteration + 1

    def inspect_tensor(self, config, layer_name, tensor_name, tensor, iteration, **more):
        self.calls.append(("inspect", layer_name, tensor_name, tuple(tensor.shape), iteration))

    def inspect_tensor_postquantize(self, config, layer_name, tensor_name, gemm, tensor, iteration):
        self.calls.append(("after", layer_name, tensor_name, gemm, type(tensor).__name__))


class Modifier:
    """Doubles what it is given."""

    def __init__(self) -> None:
        self.calls = []

    def modify_tensor_enabled(self, config, layer_name, tensor_name, gemm, iteration):
        return True, iteration + 1

    def fp8_gemm_enabled(self, config, layer_name, gemm, iteration):
        return False, None

    def modify_tensor(
        self, config, layer_name, tensor_name, gemm, tensor, default_quantizer, iteration, out=None
    ):
        self.calls.append((tensor_name, gemm, out is not None))
        if out is not None:
            out.copy_(tensor * 2)
            return None
        return tensor * 2


class HighPrecision:
    def fp8_gemm_enabled(self, config, layer_name, gemm, iteration):
        return False, iteration + 1


def build(name: str, device: str, dtype=torch.bfloat16):
    torch.manual_seed(3)
    module = MODULES[name](device=device, params_dtype=dtype, name="layer")
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return module


def train(module, recipe, tokens=(4, 8), steps=2, after_step=lambda: None):
    """Outputs, input gradients and parameter gradients of a few steps."""
    results = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(*tokens, 32, generator=generator)
        x = x.to(next(module.parameters())).requires_grad_()
        module.zero_grad()
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            y = module(x)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y))
        results += [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]
        after_step()
    return results


def assert_equal(actual, expected) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


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


def test_layer_without_features_keeps_its_run_and_asks_once() -> None:
    recorder = Recorder()
    with session(("elsewhere", recorder, {})) as s:
        module = build("norm linear", "cpu")
        train(module, RECIPES["delayed"], steps=3, after_step=s.step)
        (run,) = module._runs.values()
        assert run.inspection.first is None and run.inspect_at > s.inspector.tick + 1000
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
        te.fp8_autocast(enabled=RECIPES[recipe] is not None, fp8_recipe=RECIPES[recipe]),
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
