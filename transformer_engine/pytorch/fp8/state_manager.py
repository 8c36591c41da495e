"""`FP8GlobalStateManager`: class methods that describe the autocast which is open."""

from __future__ import annotations

from typing import Any

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.fp8.autocast import get_default_recipe
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack, reset_autocast
from transformer_engine.pytorch.fp8.availability import (
    check_fp8_block_scaling_support,
    check_fp8_support,
    check_mxfp8_support,
    check_nvfp4_support,
)
from transformer_engine.pytorch.fp8.model_init import model_init
from transformer_engine.pytorch.fp8.process_state import process_state
from transformer_engine.pytorch.fp8.scaling_state import BACKWARD, FORWARD


class FP8GlobalStateManager:
    """Class methods that describe the innermost autocast of this thread or asyncio task.

    The class keeps no state: the answers come from the stack of scopes.

    >>> from transformer_engine.pytorch import autocast
    >>> with autocast(enabled=True):
    ...     FP8GlobalStateManager.is_fp8_enabled()
    True
    """

    @classmethod
    def reset(cls) -> None:
        """Leave every region and forget which modules take part in scale updates."""
        reset_autocast()

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        """Whether FP8 runs here, and the reason where it does not."""
        return check_fp8_support()

    @classmethod
    def is_fp8_block_scaling_available(cls) -> tuple[bool, str]:
        """Whether `Float8BlockScaling` runs here, and the reason where it does not."""
        return check_fp8_block_scaling_support()

    @classmethod
    def is_mxfp8_available(cls) -> tuple[bool, str]:
        """Whether MXFP8 runs here, and the reason where it does not."""
        return check_mxfp8_support()

    @classmethod
    def is_nvfp4_available(cls) -> tuple[bool, str]:
        """Whether NVFP4 runs here, and the reason where it does not."""
        return check_nvfp4_support()

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether modules called now quantise."""
        return autocast_stack().scope.enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether modules called now record amaxes without quantising."""
        return autocast_stack().scope.calibrating

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether modules made now keep their weights in FP8 alone."""
        return model_init().enabled

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        """Whether such weights keep their initial values in high precision."""
        return model_init().preserve

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """The recipe of this region; outside of all, the default one."""
        return autocast_stack().scope.recipe or get_default_recipe()

    @classmethod
    def get_fp8_group(cls) -> Any:
        """The process group over which this region reduces amaxes; None is all ranks."""
        return autocast_stack().scope.group

    @classmethod
    def get_meta_tensor_key(cls, forward: bool = True) -> str:
        """The key of scales and amaxes in `module.fp8_meta`, see `Fp8Meta`.

        Args:
            forward: True for inputs and weights, False for gradients.
        """
        return "scaling_fwd" if forward else "scaling_bwd"

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Update the scales of delayed scaling now, and roll the histories.

        Args:
            forward: True updates the scales of inputs and weights, False those of gradients.
        """
        process_state().update(FORWARD if forward else BACKWARD)
