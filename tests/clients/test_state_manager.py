"""`FP8GlobalStateManager`, by which trainers query the autocast that they are in."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as Manager
from transformer_engine.pytorch.fp8 import fp8_model_init
from transformer_engine.pytorch.fp8.recipe_quantizers import quantized_model_init


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Manager.reset()


def test_answers_follow_the_regions() -> None:
    assert not Manager.is_fp8_enabled()
    assert Manager.get_fp8_recipe() == te.get_default_recipe()
    group = torch.distributed.ProcessGroup(0, 1)
    with te.autocast(recipe=Float8CurrentScaling(), amax_reduction_group=group):
        assert Manager.is_fp8_enabled() and not Manager.is_fp8_calibration()
        assert Manager.get_fp8_recipe() == Float8CurrentScaling()
        assert Manager.get_fp8_group() is group
        with te.fp8_autocast(enabled=False, calibrating=True):
            assert not Manager.is_fp8_enabled() and Manager.is_fp8_calibration()
    assert not Manager.is_fp8_enabled() and Manager.get_fp8_group() is None


def test_tells_how_weights_are_kept() -> None:
    assert not Manager.with_fp8_parameters()
    with fp8_model_init():
        assert Manager.with_fp8_parameters() and not Manager.with_high_precision_init_val()
        with quantized_model_init(preserve_high_precision_init_val=True):
            assert Manager.with_high_precision_init_val()
    assert not Manager.with_fp8_parameters()


def test_availability() -> None:
    assert Manager.is_fp8_available() == te.is_fp8_available(return_reason=True)
    assert Manager.is_mxfp8_available()[0] is Manager.is_nvfp4_available()[0] is False


def test_updates_scales_when_asked(device: str) -> None:
    recipe = DelayedScaling(amax_history_len=2)
    layer = te.Linear(16, 16, device=device)
    scope = te.autocast(recipe=recipe)
    scope.__enter__()
    layer(torch.full((16, 16), 2.0, device=device)).sum().backward()
    scale = layer.scaling["forward"].scale
    assert scale[0].item() == 1
    Manager.reduce_and_update_fp8_tensors(forward=True)
    assert scale[0].item() == 448 / 2
    scope.__exit__(None, None, None)


def test_reset_leaves_every_region() -> None:
    te.autocast(enabled=True).__enter__()
    Manager.reset()
    assert not Manager.is_fp8_enabled()
