"""The documented import path of FP8 regions, of their state, and of what the hardware can do."""

from transformer_engine.common.recipe import DelayedScaling, Format, Recipe
from transformer_engine.common.roles import QuantizerRole
from transformer_engine.pytorch.fp8.autocast import autocast, fp8_autocast, get_default_recipe
from transformer_engine.pytorch.fp8.autocast import get_default_recipe as get_default_fp8_recipe
from transformer_engine.pytorch.fp8.availability import (
    check_fp8_block_scaling_support,
    check_fp8_support,
    check_mxfp8_support,
    check_nvfp4_support,
    get_align_size_for_quantization,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from transformer_engine.pytorch.fp8.model_init import fp8_model_init, quantized_model_init
from transformer_engine.pytorch.fp8.state_manager import FP8GlobalStateManager

__all__ = [
    "DelayedScaling",
    "FP8GlobalStateManager",
    "Format",
    "QuantizerRole",
    "Recipe",
    "autocast",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_align_size_for_quantization",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]
