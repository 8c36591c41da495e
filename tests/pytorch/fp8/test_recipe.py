import copy
import pickle
import warnings
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    QParams,
)
from transformer_engine.pytorch.fp8.process_state import Scope
from transformer_engine.pytorch.fp8.recipe_quantizers import build_quantizers


def test_defaults_are_the_documented_ones() -> None:
    r = DelayedScaling()
    assert (r.margin, r.fp8_format, r.amax_history_len) == (0, Format.HYBRID, 1024)
    assert (r.amax_compute_algo, r.reduce_amax, r.scaling_factor_compute_algo) == (
        "max",
        True,
        None,
    )
    assert r.delayed() and r.float8_per_tensor_scaling() and not r.float8_current_scaling()
    c = Float8CurrentScaling()
    assert not c.fp8_gemm_fprop.use_split_accumulator
    assert c.fp8_gemm_dgrad.use_split_accumulator and c.fp8_gemm_wgrad.use_split_accumulator
    assert Format.HYBRID.value.max_fwd == 448.0 and Format.HYBRID.value.max_bwd == 57344.0


def test_equal_fields_make_equal_recipes() -> None:
    assert DelayedScaling(margin=1) == DelayedScaling(margin=1)
    assert hash(DelayedScaling()) == hash(DelayedScaling())
    assert DelayedScaling(margin=1) != DelayedScaling()
    with pytest.raises(AttributeError):
        DelayedScaling().margin = 3  # type: ignore[misc]


def test_unknown_keywords_warn_once_by_name() -> None:
    with pytest.warns(UserWarning, match=r"ignoring unknown keyword\(s\) device, params_dtype"):
        r = DelayedScaling(margin=2, params_dtype=torch.float32, device="cuda")
    assert r.margin == 2


@pytest.mark.parametrize(
    ("recipe", "written", "meant"),
    [
        (DelayedScaling, "amax_history_length", "amax_history_len"),
        (Float8CurrentScaling, "fp8_fromat", "fp8_format"),
        (Float8BlockScaling, "use_f32_scale", "use_f32_scales"),
    ],
)
def test_misspelt_keywords_are_errors(recipe, written: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"{written} is not known; did you mean {meant}"):
        recipe(**{written: 3})


def test_subclasses_may_pass_foreign_keywords() -> None:
    class Trainers(DelayedScaling):
        def __init__(self) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                super().__init__(margin=1, params_dtype=torch.float32)

    assert Trainers().margin == 1 and Trainers().delayed()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fp8_format": Format.E5M2}, "expected fp8_format to be Format.HYBRID or Format.E4M3"),
        (
            {"fp8_format": "HYBRID"},
            "expected fp8_format to be a Format, such as Format.HYBRID, got 'HYBRID'",
        ),
        ({"amax_history_len": 0}, "expected amax_history_len to be an int >= 1, got 0"),
        ({"amax_history_len": True}, "expected amax_history_len to be an int >= 1, got True"),
        ({"amax_history_len": 16.0}, "expected amax_history_len to be an int >= 1, got 16.0"),
        (
            {"override_linear_precision": None},
            r"override_linear_precision to be three flags, \(fprop, dgrad, wgrad\), got None",
        ),
        ({"amax_compute_algo": "mean"}, "expected amax_compute_algo to be 'max', 'most_recent'"),
    ],
)
def test_bad_values_are_refused_at_construction(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DelayedScaling(**arguments)


@pytest.mark.parametrize(
    ("kind", "arguments", "expected"),
    [
        (DelayedScaling, {"reduce_amax": "False"}, "reduce_amax to be True or False, got 'False'"),
        (DelayedScaling, {"fp8_dpa": "no"}, "fp8_dpa to be True or False"),
        (DelayedScaling, {"interval": Format.E4M3}, "interval to be an int, got <Format.E4M3"),
        (Float8CurrentScaling, {"use_power_2_scales": 2}, "use_power_2_scales to be True or False"),
        (Float8CurrentScaling, {"fp8_quant_fwd_inp": True}, "fp8_quant_fwd_inp to be a QParams"),
        (Float8BlockScaling, {"fp8_gemm_fprop": False}, "fp8_gemm_fprop to be an MMParams"),
        (Float8BlockScaling, {"use_f32_scales": "no"}, "use_f32_scales to be True or False"),
        (QParams, {"power_2_scale": "no"}, "power_2_scale to be True or False"),
        (QParams, {"amax_epsilon": "1e-3"}, "amax_epsilon to be a number"),
        (MMParams, {"use_split_accumulator": ""}, "use_split_accumulator to be True or False"),
        (MMParams, {"use_split_accumulator": torch.tensor(True)}, "use_split_accumulator to be"),
        (DelayedScaling, {"fp8_mha": np.array([1])}, r"fp8_mha to be True or False, got array"),
        (DelayedScaling, {"fp8_mha": torch.ones(2)}, r"fp8_mha to be True or False, got tensor"),
        (DelayedScaling, {"override_linear_precision": ("no", 0, 0)}, "override_linear_precision"),
        (Float8BlockScaling, {"w_block_scaling_dim": 2.0}, "w_block_scaling_dim to be 1 or 2"),
        (Float8BlockScaling, {"x_block_scaling_dim": True}, "x_block_scaling_dim to be 1 or 2"),
        (QParams, {"amax_epsilon": True}, "amax_epsilon to be a number, got True"),
        (QParams, {"amax_epsilon": -1}, "amax_epsilon to be a finite number >= 0, got -1.0"),
        (QParams, {"amax_epsilon": float("nan")}, "amax_epsilon to be a finite number >= 0"),
        (QParams, {"amax_epsilon": 1e39}, "amax_epsilon to be a finite number >= 0"),
    ],
)
def test_fields_of_other_types_are_refused(kind: type, arguments: dict, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"\[{kind.__name__}\] expected {expected}"):
        kind(**arguments)


def test_what_scripts_have_for_flags_is_taken() -> None:
    assert DelayedScaling(interval=-1, fp8_dpa=0, fp8_mha=None) == DelayedScaling(interval=-1)
    assert MMParams(use_split_accumulator=1) == MMParams(use_split_accumulator=np.True_)
    assert type(QParams(amax_epsilon=np.float32(0.5)).amax_epsilon) is float
    assert type(Float8BlockScaling(x_block_scaling_dim=np.int64(1)).x_block_scaling_dim) is int
    flags = DelayedScaling(override_linear_precision=(0, np.False_, None)).override_linear_precision
    assert flags == (False, False, False)


def test_flags_of_autocasts_are_no_words() -> None:
    for flag in ("enabled", "calibrating"):
        with pytest.raises(TypeError, match=rf"\[autocast\] expected {flag} to be True or False"):
            te.autocast(**{flag: "False"})
    for flag in ("enabled", "preserve_high_precision_init_val"):
        with pytest.raises(TypeError, match=f"expected {flag} to be True or False, got 'yes'"):
            te.quantized_model_init(**{flag: "yes"})
    for value in (True, 1, None, np.True_):
        te.autocast(enabled=value, calibrating=value)
        te.fp8_model_init(enabled=value)
    for value in (torch.tensor(True), torch.ones(2), np.array([1]), np.array([1, 0]), 1.0):
        with pytest.raises(TypeError, match=r"\[autocast\] expected enabled to be True or False"):
            te.autocast(enabled=value)
        with pytest.raises(TypeError, match="expected enabled to be True or False"):
            te.fp8_model_init(enabled=value)


def test_override_linear_precision_is_accepted_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="override_linear_precision is accepted"):
        DelayedScaling(override_linear_precision=(False, False, True))


def test_numbers_and_lists_of_any_library_make_equal_recipes() -> None:
    numbers: dict = {"margin": np.int64(1), "amax_history_len": np.int32(16)}
    flags: dict = {"override_linear_precision": [False, False, False], "fp8_dpa": np.False_}
    other, own = DelayedScaling(**numbers, **flags), DelayedScaling(margin=1, amax_history_len=16)
    assert other == own and hash(other) == hash(own) and repr(other) == repr(own)
    with te.autocast(recipe=other):
        te.Linear(16, 16, device="cpu")(torch.ones(16, 16))


def test_recipes_of_older_pickles_run() -> None:
    """These pickles contain only the fields."""
    fields = {"power_2_scale": False, "amax_epsilon": 2.0}
    old = QParams.__new__(QParams)
    old.__setstate__(fields)
    assert old == QParams(**fields) and vars(old) == vars(QParams(**fields))
    assert pickle.loads(pickle.dumps(Float8CurrentScaling())) == Float8CurrentScaling()


def test_module_is_importable_by_its_documented_path() -> None:
    assert recipe.DelayedScaling is DelayedScaling


def test_block_scaling_says_what_the_quantizers_do(monkeypatch) -> None:
    b = Float8BlockScaling()
    assert b.float8_block_scaling() and not b.float8_per_tensor_scaling()
    assert (b.x_block_scaling_dim, b.w_block_scaling_dim, b.grad_block_scaling_dim) == (1, 2, 1)
    assert b.fp8_format is Format.E4M3 and b.fp8_gemm_fprop.use_split_accumulator

    def rules(recipe: Float8BlockScaling) -> list[tuple[int, bool, float]]:
        class Module:
            gemm_count = 1

        scope = Scope(enabled=True, recipe=recipe)
        built = build_quantizers(Module(), scope, True, torch.device("cpu"))
        (six,) = built.gemms
        assert not built.moved and six.fast_accumulation == (False, False, False)
        three = (six.input, six.weight, six.grad_output)
        assert all(quantizer.format == 5 for quantizer in three)
        return [(q.dimensions, q.power_of_2, q.epsilon) for q in three]

    assert rules(b) == [(1, True, 0.0), (2, True, 0.0), (1, True, 0.0)]
    assert rules(Float8BlockScaling(use_f32_scales=True))[1] == (2, False, 0.0)
    mixed = Float8BlockScaling(
        x_block_scaling_dim=2,
        w_block_scaling_dim=1,
        fp8_quant_bwd_grad=QParams(power_2_scale=False, amax_epsilon=1e-3),
    )
    assert rules(mixed) == [(2, True, 0.0), (1, True, 0.0), (1, False, 1e-3)]
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    assert Float8BlockScaling().use_f32_scales and Float8BlockScaling() != b


def test_current_scaling_reads_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes that are made later round scales down; an explicit argument stands above it."""
    before = Float8CurrentScaling()
    monkeypatch.setenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "1")
    assert not before.use_power_2_scales and Float8CurrentScaling().use_power_2_scales
    assert Float8CurrentScaling(use_power_2_scales=False) == before
    layer, x = te.Linear(16, 16, bias=False, device="cpu"), torch.randn(16, 16)
    results = []
    for each in (Float8CurrentScaling(), Float8CurrentScaling(use_power_2_scales=True), before):
        with te.autocast(recipe=each):
            results.append(layer(x))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    monkeypatch.setenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "0")
    assert not Float8CurrentScaling().use_power_2_scales


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fp8_format": Format.HYBRID}, "expected fp8_format to be Format.E4M3, got"),
        ({"x_block_scaling_dim": 3}, "expected x_block_scaling_dim to be 1 or 2, got 3"),
        ({"x_block_scaling_dim": 2}, "x_block_scaling_dim and w_block_scaling_dim to be 2 for one"),
        ({"fp8_gemm_dgrad": MMParams(False)}, "fp8_gemm_dgrad.use_split_accumulator to be True"),
        ({"fp8_dpa": True}, "expected fp8_dpa to be False, got True"),
    ],
)
def test_block_scaling_refuses_what_no_gemm_can_do(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=rf"\[Float8BlockScaling\] .*{message}"):
        Float8BlockScaling(**arguments)


def test_block_scaling_is_available_with_a_reason_where_not(monkeypatch) -> None:
    with monkeypatch.context() as on_cpu:
        on_cpu.setattr(torch.cuda, "is_available", lambda: False)
        assert te.is_fp8_block_scaling_available() is True
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    for capability, reason in [((8, 9), "compute capability 9.0"), ((9, 0), "12.9 or newer")]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        available, found = te.is_fp8_block_scaling_available(return_reason=True)
        assert not available and reason in found
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert te.is_fp8_block_scaling_available(return_reason=True) == (True, "")


@pytest.mark.parametrize("margin", [127, -127, 0.5, 1.0, True, None])
def test_margins_that_scales_cannot_have(margin) -> None:
    with pytest.raises(ValueError, match=r"expected margin to be an int within \+-126, got"):
        DelayedScaling(margin=margin)


def test_a_function_of_scales_that_is_none() -> None:
    text = "expected scaling_factor_compute_algo to be a callable or None, got 'log'"
    with pytest.raises(ValueError, match=text):
        DelayedScaling(scaling_factor_compute_algo="log")


@pytest.mark.parametrize("kind", [DelayedScaling, Float8CurrentScaling, Float8BlockScaling])
def test_assignments_say_what_to_write_instead(kind):
    recipe = kind()
    words = rf"\[{kind.__name__}\] .* dataclasses.replace\(recipe, fp8_dpa=True\)"
    with pytest.raises(FrozenInstanceError, match=words):
        recipe.fp8_dpa = True
    words = rf"\[{kind.__name__}\] .* of fp8_dpaa; the fields of {kind.__name__} are .*fp8_dpa, "
    with pytest.raises(FrozenInstanceError, match=words):
        recipe.fp8_dpaa = True
    with pytest.raises(FrozenInstanceError, match=rf"\[{kind.__name__}\] .* deletion of fp8_dpa$"):
        del recipe.fp8_dpa
    assert recipe == kind() and hash(recipe) == hash(kind())
    assert pickle.loads(pickle.dumps(recipe)) == copy.deepcopy(recipe) == recipe
