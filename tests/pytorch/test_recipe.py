import warnings

import pytest
import torch

from transformer_engine.common import recipe
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format


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
        ({"fp8_format": "HYBRID"}, "expected fp8_format to be a Format, got 'HYBRID'"),
        ({"amax_history_len": 0}, "expected amax_history_len to be an int >= 1, got 0"),
        ({"amax_compute_algo": "mean"}, "expected amax_compute_algo to be 'max', 'most_recent'"),
    ],
)
def test_bad_values_are_refused_at_construction(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DelayedScaling(**arguments)


def test_override_linear_precision_is_accepted_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="override_linear_precision is accepted"):
        DelayedScaling(override_linear_precision=(False, False, True))


def test_module_is_importable_by_its_documented_path() -> None:
    assert recipe.DelayedScaling is DelayedScaling
