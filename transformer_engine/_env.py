"""Environment variables. No other module reads them; each is read anew whenever a caller asks."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

# `os.environ.get` of a variable that is not set raises two exceptions inside, which takes about
# 1 us; attention asks in every call.
_VARIABLES: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]


class AttentionVariables(NamedTuple):
    """Which attention backends the user allows.

    Attributes:
        flash: NVTE_FLASH_ATTN, default 1.
        fused: NVTE_FUSED_ATTN, default 1.
        unfused: NVTE_UNFUSED_ATTN, default 1.
        nondeterministic: NVTE_ALLOW_NONDETERMINISTIC_ALGO, default 1; 0 asks for gradients that
            repeat bit for bit.
        flash2: NVTE_FLASH_ATTN_V2, default 1.
        flash3: NVTE_FLASH_ATTN_V3, default 1.
        flash4: NVTE_FLASH_ATTN_V4, default 1.
        fused_backend: NVTE_FUSED_ATTN_BACKEND: 0 or 1 for 16 bit, 2 for FP8; None for any.
        flash_backward: NVTE_FUSED_ATTN_USE_FAv2_BWD, default 0.
        workspace: NVTE_FUSED_ATTN_FORCE_WORKSPACE_OPT; None leaves the choice to the backend.
        debug: NVTE_DEBUG_LEVEL if NVTE_DEBUG=1, else 0: 1 names the chosen backend, 2 also says
            why it was chosen.
        fp8_backward: NVTE_FP8_DPA_BWD: whether FP8 attention has its backward in FP8, too; None
            leaves the choice to the backend.
    """

    flash: bool = True
    fused: bool = True
    unfused: bool = True
    nondeterministic: bool = True
    flash2: bool = True
    flash3: bool = True
    flash4: bool = True
    fused_backend: int | None = None
    flash_backward: bool = False
    workspace: bool | None = None
    debug: int = 0
    fp8_backward: bool | None = None


_ATTENTION = (
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "NVTE_UNFUSED_ATTN",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NVTE_FLASH_ATTN_V2",
    "NVTE_FLASH_ATTN_V3",
    "NVTE_FLASH_ATTN_V4",
    "NVTE_FUSED_ATTN_BACKEND",
    "NVTE_FUSED_ATTN_USE_FAv2_BWD",
    "NVTE_FUSED_ATTN_FORCE_WORKSPACE_OPT",
    "NVTE_DEBUG",
    "NVTE_DEBUG_LEVEL",
    "NVTE_FP8_DPA_BWD",
)
_DEVICE = (
    "TE_FP8_TENSOR_CORES",
    "TE_CLUSTERS",
    "TE_DEPENDENT_LAUNCH",
    "TE_SHARED_MEMORY_KIB",
)
_SWITCHES = 7  # the first seven of _ATTENTION are switches, which are on unless they are 0
_READ = (
    *_ATTENTION,
    *_DEVICE,
    "NVTE_BACKWARD_OVERRIDE",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
    "TE_ONE_SHOT_COLLECTIVES",
    "TE_CUBLASLT_PATH",
    "TE_CUDNN_PATH",
    "TE_NCCL_PATH",
)
_ATTENTION_KEYS = tuple(name.encode() for name in _ATTENTION)
_DEFAULT = AttentionVariables()


def attention_variables() -> AttentionVariables:
    """Read the variables that choose an attention backend, as they are now."""
    if _VARIABLES.keys().isdisjoint(_ATTENTION_KEYS):
        return _DEFAULT
    return _parsed(*map(_VARIABLES.get, _ATTENTION_KEYS))


@functools.lru_cache
def _parsed(*variables: bytes | None) -> AttentionVariables:
    """The meaning of these values of `_ATTENTION`; None for a variable that is not set."""
    values = [None if raw is None else os.fsdecode(raw) for raw in variables]
    switches = [value is None or value.strip() != "0" for value in values[:_SWITCHES]]
    numbers = [_number(v) for v in values[_SWITCHES:]]
    backend, flash_backward, workspace, debug, level, fp8_backward = numbers
    return AttentionVariables._make(
        (
            *switches,
            backend,
            bool(flash_backward),
            None if workspace is None else bool(workspace),
            (level or 0) if debug else 0,
            None if fp8_backward is None else bool(fp8_backward),
        )
    )


def _number(value: str | None) -> int | None:
    text = "" if value is None else value.strip()
    return int(text) if text.isdigit() else None


class DeviceVariables(NamedTuple):
    """Which features of GPUs the user leaves on; docs/how-to/gpus.md says what replaces them.

    Attributes:
        fp8_products: TE_FP8_TENSOR_CORES, default 1.
        clusters: TE_CLUSTERS, default 1.
        dependent_launch: TE_DEPENDENT_LAUNCH, default 1.
        shared_bytes: TE_SHARED_MEMORY_KIB, in bytes: the most shared memory of a thread block; 0
            stands for the limit of the device.
    """

    fp8_products: bool = True
    clusters: bool = True
    dependent_launch: bool = True
    shared_bytes: int = 0


def device_variables() -> DeviceVariables:
    """Read the variables that switch features of GPUs off.

    Raises:
        ValueError: TE_SHARED_MEMORY_KIB is not a number, or below what every GPU has.
    """
    *switches, shared = (os.environ.get(name, "").strip() for name in _DEVICE)
    least = 48  # KiB that a block gets on every GPU without an opt-in
    if shared and (not shared.isdigit() or int(shared) < least):
        raise ValueError(f"expected TE_SHARED_MEMORY_KIB of at least {least}, got {shared!r}")
    fp8_products, clusters, dependent_launch = (value != "0" for value in switches)
    return DeviceVariables(fp8_products, clusters, dependent_launch, 1024 * int(shared or 0))


def block_scaling_fp32_scales() -> bool:
    """NVTE_FP8_BLOCK_SCALING_FP32_SCALES: whether scales of blocks may be any fp32 numbers."""
    return os.environ.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0").strip() == "1"


def current_scaling_power_2_scales() -> bool:
    """NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES: whether current scaling rounds scales down."""
    return os.environ.get("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "0").strip() == "1"


def backward_override() -> str | None:
    """NVTE_BACKWARD_OVERRIDE: the default of recipes; None if it is not set, or empty."""
    return os.environ.get("NVTE_BACKWARD_OVERRIDE", "").strip() or None


def one_shot_collectives() -> bool:
    """TE_ONE_SHOT_COLLECTIVES, default 1; with 0 on all ranks small tensors take other ways."""
    return os.environ.get("TE_ONE_SHOT_COLLECTIVES", "1").strip() != "0"


def library_path(name: str) -> str:
    """TE_<NAME>_PATH: the file to open as CUBLASLT, CUDNN or NCCL; "" leaves the search to us."""
    return os.environ.get(f"TE_{name}_PATH", "")


def variables_set() -> dict[str, tuple[str, bool]]:
    """All NVTE_* and TE_* variables that are set: value, and whether anything here reads them."""
    return {
        name: (value, name in _READ)
        for name, value in sorted(os.environ.items())
        if name.startswith(("NVTE_", "TE_"))
    }
