"""Which number formats run here, and why others do not."""

from __future__ import annotations

import torch

from transformer_engine import _devices, _env
from transformer_engine.common.recipe import CustomRecipe, Recipe

Availability = bool | tuple[bool, str]

_NOT_HERE = "{} is not implemented: it needs the tensor cores of compute capability 10.0"


def _answer(reason: str, return_reason: bool) -> Availability:
    return (not reason, reason) if return_reason else not reason


def _why_no_product(in_blocks: bool) -> str:
    if not torch.cuda.is_available():
        return ""
    limits = _devices.limits_of(get_device_compute_capability(), _env.device_variables())
    return _devices.why_no_product(limits, in_blocks)


def is_fp8_available(return_reason: bool = False) -> Availability:
    """Whether GEMMs multiply FP8 directly: on CPUs, and on GPUs from compute capability 8.9.

    Other GPUs run FP8, too, with the same casts, but multiply in bf16, so it is no faster.

    Args:
        return_reason: return `(available, reason)`; the reason is empty where FP8 is available.

    >>> available, reason = is_fp8_available(return_reason=True)
    >>> available == (reason == "")
    True
    """
    return _answer(_why_no_product(in_blocks=False), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> Availability:
    """Whether GEMMs multiply operands of `Float8BlockScaling` directly: on CPUs and Hopper GPUs.

    Other GPUs run it, too, but multiply the dequantised operands in fp32, which is slow.

    Args:
        return_reason: return `(available, reason)`; the reason is empty where it is available.

    >>> available, reason = is_fp8_block_scaling_available(return_reason=True)
    >>> available == (reason == "")
    True
    """
    reason = _why_no_product(in_blocks=True)
    if torch.cuda.is_available() and not reason:
        cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
        if cuda < (12, 9):
            reason = f"block scaling needs CUDA 12.9 or newer, torch brings {torch.version.cuda}"
    return _answer(reason, return_reason)


def is_mxfp8_available(return_reason: bool = False) -> Availability:
    """Whether MXFP8 runs here: never so far.

    Args:
        return_reason: return `(available, reason)`.

    >>> is_mxfp8_available()
    False
    """
    return _answer(_NOT_HERE.format("MXFP8"), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> Availability:
    """Whether NVFP4 runs here: never so far.

    Args:
        return_reason: return `(available, reason)`.

    >>> is_nvfp4_available()
    False
    """
    return _answer(_NOT_HERE.format("NVFP4"), return_reason)


def is_bf16_available(return_reason: bool = False) -> Availability:
    """Whether bf16 runs here: always on CPUs; on GPUs from compute capability 8.0 on.

    Args:
        return_reason: return `(available, reason)`; the reason is empty where bf16 is available.

    >>> available, reason = is_bf16_available(return_reason=True)
    >>> available == (reason == "")
    True
    """
    reason = ""
    if torch.cuda.is_available() and get_device_compute_capability() < (8, 0):
        reason = "bf16 needs a GPU of compute capability 8.0 or higher"
    return _answer(reason, return_reason)


def get_cudnn_version() -> tuple[int, int, int]:
    """`(major, minor, patch)` of the cuDNN that torch uses.

    Raises:
        RuntimeError: torch has none.
    """
    version = torch.backends.cudnn.version()
    if version is None:
        raise RuntimeError("[get_cudnn_version] expected a torch with cuDNN, got one without")
    return version // 10000, version // 100 % 100, version % 100


def get_device_compute_capability() -> tuple[int, int]:
    """`(major, minor)` of the current GPU.

    Raises:
        RuntimeError: torch sees no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("[get_device_compute_capability] expected a GPU, got none")
    return torch.cuda.get_device_capability()


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """Of which number the tokens of each expert should be a multiple under a recipe.

    Args:
        recipe: a recipe; a `CustomRecipe` says it itself.

    >>> from transformer_engine.common.recipe import DelayedScaling
    >>> get_align_size_for_quantization(DelayedScaling())
    16
    """
    return recipe.quantization_alignment if isinstance(recipe, CustomRecipe) else 16


def check_fp8_support() -> tuple[bool, str]:
    """`is_fp8_available(return_reason=True)`, under the name of older versions."""
    return is_fp8_available(return_reason=True)  # type: ignore[return-value]


def check_fp8_block_scaling_support() -> tuple[bool, str]:
    """`is_fp8_block_scaling_available(return_reason=True)`, under the name of older versions."""
    return is_fp8_block_scaling_available(return_reason=True)  # type: ignore[return-value]


def check_mxfp8_support() -> tuple[bool, str]:
    """`is_mxfp8_available(return_reason=True)`, under the name of older versions."""
    return is_mxfp8_available(return_reason=True)  # type: ignore[return-value]


def check_nvfp4_support() -> tuple[bool, str]:
    """`is_nvfp4_available(return_reason=True)`, under the name of older versions."""
    return is_nvfp4_available(return_reason=True)  # type: ignore[return-value]
