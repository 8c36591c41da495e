"""The debugger with FP8 weights: it inspects them, and modifies operands that GEMMs get."""

from pathlib import Path

import pytest
import torch
from debug_session import Config, debugging, logged, section
from fake_manager import session
from fp8_kinds import codes, scales
from hook_cases import MODULES, HighPrecision, Modifier, Recorder, train
from rulers import assert_equal

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch.tensor import Float8Tensor

RECIPES = {
    "high precision": None,
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(use_power_2_scales=True),
    "blocks": Float8BlockScaling(),
}
kinds = pytest.mark.parametrize("recipe", ["current", "blocks"])
pytestmark = pytest.mark.filterwarnings("ignore:.*is kept in FP8 and is dequantised")


def fp8_module(name: str, device: str, recipe: str) -> torch.nn.Module:
    torch.manual_seed(3)
    with te.fp8_model_init(recipe=RECIPES[recipe]):
        return MODULES[name](device=device, params_dtype=torch.bfloat16, name="layer")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["linear", "swiglu mlp"])
def test_looking_changes_no_bit(device: str, name: str, recipe: str) -> None:
    expected = train(fp8_module(name, device, recipe), RECIPES[recipe])
    recorder = Recorder()
    with session(("layer", recorder, {})) as s:
        actual = train(fp8_module(name, device, recipe), RECIPES[recipe], after_step=s.step)
    assert_equal(actual, expected)
    weights = [c for c in recorder.calls if c[0] == "inspect" and c[2] == "weight"]
    assert len(weights) == 2 * (2 if "mlp" in name else 1)


@kinds
def test_features_get_values_and_the_codes_that_gemms_take(recipe: str, device: str) -> None:
    found = {}

    class Looker:
        def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration):
            return True

        def inspect_tensor(
            self, config, tensor, rowwise_quantized_tensor, columnwise_quantized_tensor, quantizer
        ):
            found["values"] = tensor
            found["sides"] = rowwise_quantized_tensor, columnwise_quantized_tensor
            found["quantizer"] = quantizer

    module = fp8_module("linear", device, recipe)
    with session(("layer", Looker(), {"tensors": ["weight"]})):
        train(module, RECIPES[recipe], steps=1)
    assert torch.equal(found["values"], module.weight.dequantize())
    for seen in found["sides"]:
        assert type(seen) is type(module.weight) and torch.equal(codes(seen), codes(module.weight))
        assert torch.equal(seen.side(True).codes, codes(module.weight).T)
    assert found["quantizer"].dtype == module.weight._fp8_dtype


@kinds
@pytest.mark.parametrize("gemm", ["fprop", "dgrad"])
def test_a_gemm_in_high_precision_takes_the_values(gemm: str, recipe: str, device: str) -> None:
    module, recipe = fp8_module("linear", device, recipe), RECIPES[recipe]
    plain = MODULES["linear"](device=device, params_dtype=torch.bfloat16, name="layer")
    plain.load_state_dict(module.state_dict())
    with session(("layer", HighPrecision(), {"gemms": [gemm]})):
        te.gemm_report(reset=True)
        ours, theirs = train(module, recipe, steps=1), train(plain, recipe, steps=1)
    assert te.gemm_report().total("bf16") == 2 and te.gemm_report().total("fp8") == 4
    assert_equal(ours, theirs)


@kinds
def test_features_may_replace_what_a_gemm_takes(recipe: str, device: str) -> None:
    modifiers = [Modifier(), Modifier()]
    module, recipe = fp8_module("linear", device, recipe), RECIPES[recipe]
    plain = MODULES["linear"](device=device, params_dtype=torch.bfloat16, name="layer")
    plain.load_state_dict(module.state_dict())
    found = []
    for one, modifier in zip((module, plain), modifiers, strict=True):
        with session(("layer", modifier, {"tensors": ["weight"], "gemms": ["fprop"]})):
            found.append(train(one, recipe, steps=1))
    assert_equal(*found)
    assert modifiers[0].calls == modifiers[1].calls == [("weight", "fprop", False)]


MOMENTS = ["min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range"]
CASTS = ["scale_inv_min", "scale_inv_max", "scale_inv_max_columnwise"]
DUMP = section("DumpTensors", tensors=["weight"], high_precision_tensor=True)


@pytest.mark.parametrize("beside", [[], [DUMP]], ids=["alone", "beside DumpTensors"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "blocks"])
def test_statistics_are_those_of_the_values(
    recipe: str, tmp_path: Path, device: str, beside: list[Config]
) -> None:
    expected = train(fp8_module("linear", device, recipe), RECIPES[recipe])
    module = fp8_module("linear", device, recipe)
    blocks = {"max_blockwise_dynamic_range": {"block_size": 16, "dims": 1}}
    sections = [
        section("LogTensorStats", tensors=["weight"], stats=[*MOMENTS, blocks]),
        section("LogFp8TensorStats", tensors=["weight"], stats=[*CASTS, "mse"]),
    ]
    with debugging(tmp_path, *sections, *beside):
        actual = train(module, RECIPES[recipe], after_step=debug_api.step)
    assert_equal(actual, expected)
    found = logged(tmp_path)
    values = module.weight.dequantize().double()
    for step in range(2):
        row = found[step, "layer", "weight"]
        for name, value in {
            "min": values.min(),
            "max": values.max(),
            "mean": values.mean(),
            "std": values.std(),
            "l1_norm": values.abs().sum(),
            "l2_norm": values.norm(),
            "cur_amax": values.abs().max(),
            "dynamic_range": values.abs().max().log2() - values[values != 0].abs().min().log2(),
        }.items():
            assert row[name] == pytest.approx(value.item(), rel=1e-5, abs=1e-7), name
        assert any("blockwise" in name for name in row)
        own = scales(module.weight).flatten()
        known = own[:1] if isinstance(module.weight, Float8Tensor) else own[own != 0]
        for name in CASTS:
            expected = known.min() if "min" in name else known.max()
            assert row[name] == pytest.approx(expected.item(), rel=1e-6)
        assert row.get("mse") is None  # the error of the cast is no longer known


@kinds
def test_statistics_of_a_weight_whose_dgrad_is_in_high_precision(
    recipe: str, tmp_path: Path
) -> None:
    """The GEMM takes the values of the weight, and kernels compute their statistics."""
    module = fp8_module("linear", "cpu", recipe)
    sections = [
        section("LogTensorStats", tensors=["weight"], stats=["cur_amax"]),
        section("DisableFP8GEMM", gemms=["dgrad"]),
    ]
    with debugging(tmp_path, *sections):
        te.gemm_report(reset=True)
        train(module, RECIPES[recipe], after_step=debug_api.step)
    assert te.gemm_report().total("bf16") == 2
    amax = logged(tmp_path)[1, "layer", "weight"]["cur_amax"]
    assert amax == module.weight.dequantize().abs().max().item()
