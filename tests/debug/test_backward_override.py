"""The debugger with recipes that run dgrad and wgrad in high precision."""

from pathlib import Path

import pytest
import torch
from backward_override import OVERRIDES, overriding
from debug_session import SIX, debugging, logged, section
from fake_manager import session
from hook_cases import MODULES, HighPrecision, Modifier, Recorder, build, train
from rulers import assert_equal

import nvdlfw_inspect.api as debug_api

overrides = pytest.mark.parametrize("override", OVERRIDES)
recipes = pytest.mark.parametrize("recipe", ["current", "blocks"])
names = pytest.mark.parametrize("name", MODULES)


class InForward(Modifier):
    """Doubles operands and the result of fprop, which runs in high precision."""

    def modify_tensor_enabled(self, config, layer_name, tensor_name, gemm, iteration):
        return gemm == "fprop", iteration + 1

    def fp8_gemm_enabled(self, config, layer_name, gemm, iteration):
        return gemm != "fprop", None


class InBackward(Modifier):
    """Doubles operands and results of dgrad and wgrad."""

    def modify_tensor_enabled(self, config, layer_name, tensor_name, gemm, iteration):
        return gemm != "fprop", iteration + 1

    def fp8_gemm_enabled(self, config, layer_name, gemm, iteration):
        return True, None


def run(feature, name: str, device: str, recipe, tokens=(4, 8)) -> list[torch.Tensor]:
    with session(("layer", feature, {})) as s:
        return train(build(name, device), recipe, tokens, after_step=s.step)


@overrides
@recipes
@names
@pytest.mark.parametrize("tokens", [(4, 8), (3, 7)])  # FP8 pads 21 tokens
def test_looking_changes_no_bit(tokens, name, recipe, override, device: str) -> None:
    with_override, recorder = overriding(recipe, override), Recorder()
    actual = run(recorder, name, device, with_override, tokens)
    assert_equal(actual, train(build(name, device), with_override, tokens))
    after = {call[2:4] for call in recorder.calls if call[0] == "after"}
    assert after == {("activation", "fprop"), ("weight", "fprop")}  # other operands are no casts


@overrides
@recipes
@names
def test_features_decide_about_the_forward(name, recipe, override, device: str) -> None:
    with_override = overriding(recipe, override)
    plain = run(HighPrecision(), name, device, with_override)
    assert_equal(plain, train(build(name, device), None))
    changed = run(Modifier(), name, device, with_override)
    assert_equal(changed, run(Modifier(), name, device, None))


@overrides
@recipes
def test_features_replace_operands_of_the_backward(recipe, override, device: str) -> None:
    with_override, feature = overriding(recipe, override), InBackward()
    found = run(feature, "linear", device, with_override)
    assert {("activation", "wgrad", False), ("weight", "dgrad", False)} <= set(feature.calls)
    plain = train(build("linear", device), overriding(recipe, "high_precision"))
    for i in (0, 4):  # output, gradient of the input, of weight and bias; twice
        assert torch.equal(found[i], plain[i])
        for actual, one in zip(found[i + 1 : i + 3], plain[i + 1 : i + 3], strict=True):
            assert torch.allclose(actual.float(), 8 * one.float(), atol=1e-3)


def test_the_backward_reads_what_a_feature_made_of_the_forward(device: str) -> None:
    """Only the codes of a recipe are dequantised."""
    values, others = [
        run(InForward(), "linear", device, overriding("current", override))
        for override in OVERRIDES
    ]
    for i in (1, 2):  # gradients of the input and of the weight
        assert torch.allclose(2 * values[i].float(), others[i].float(), atol=1e-3)


@overrides
@names
def test_statistics_are_those_of_the_casts(name, override, device: str, tmp_path: Path) -> None:
    found = []
    for each in (override, None):
        folder = tmp_path / str(each)
        with_override = overriding("current", each)
        of_casts = section("LogFp8TensorStats", tensors=["activation", "weight"], stats=["mse"])
        of_values = section("LogTensorStats", tensors=SIX, stats=["max", "mean"])
        with debugging(folder, of_casts, of_values):
            actual = train(build(name, device), with_override, after_step=debug_api.step)
        assert_equal(actual, train(build(name, device), with_override))
        rows = logged(folder)
        assert {tensor for _, _, tensor in rows} == set(SIX)
        found.append({key: row for key, row in rows.items() if "mse" in row})
        log = "".join(path.read_text() for path in folder.rglob("*.log"))
        how = "High precision" if each else "FP8 quantization"
        for operand in ("activation, gemm wgrad", "weight, gemm dgrad", "gradient, gemm dgrad"):
            assert f"Tensor: {operand} - {how}" in log
        assert "Tensor: activation, gemm fprop - FP8 quantization" in log
    assert found[0].keys() == found[1].keys() != set()
    for key, row in found[0].items():  # another kernel adds up in another order
        assert row == pytest.approx(found[1][key], rel=1e-9), key


@pytest.mark.filterwarnings("ignore:.*Skipping stats collection")
def test_a_scale_for_a_gemm_of_the_backward_has_no_effect(device: str, tmp_path: Path) -> None:
    with_override = overriding("current", "dequantized")
    scaling = section(
        "PerTensorScaling", gemms=["dgrad", "wgrad"], tensors=["gradient", "activation"], margin=1
    )
    with debugging(tmp_path, scaling):
        actual = train(build("linear", device), with_override, after_step=debug_api.step)
    assert_equal(actual, train(build("linear", device), with_override))
    log = "".join(path.read_text() for path in tmp_path.rglob("*.log"))
    assert "leaves gradient, gemm dgrad as it is: the recipe runs this GEMM in high" in log


@overrides
def test_statistics_in_compiled_code(override, device: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    with_override, found = overriding("current", override), []
    for compiled in (False, True):
        module = build("norm linear", device)
        if compiled:
            module.compile(fullgraph=True, backend="aot_eager")
        folder = tmp_path / str(compiled)
        of_casts = section("LogFp8TensorStats", tensors=["activation", "weight"], stats=["mse"])
        of_values = section("LogTensorStats", tensors=SIX, stats=["max", "mean"])
        with debugging(folder, of_casts, of_values):
            train(module, with_override, after_step=debug_api.step)
        found.append(logged(folder))
    assert found[0] == found[1]
