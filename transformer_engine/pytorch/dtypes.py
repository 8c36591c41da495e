"""Element types as the native module numbers them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Any

import torch

from transformer_engine.pytorch._torch_private import any_autocast_enabled


class DType(IntEnum):
    """Element types of native tensors; FP8 payloads travel as uint8 beside their `DType`.

    >>> DType.kFloat8E4M3.name, int(DType.kFloat8E5M2)
    ('kFloat8E4M3', 6)
    """

    kByte = 0
    kInt32 = 1
    kFloat32 = 2
    kFloat16 = 3
    kBFloat16 = 4
    kFloat8E4M3 = 5
    kFloat8E5M2 = 6

    @staticmethod
    def of(value: DType | torch.dtype | int) -> DType:
        """The type with this number, or the counterpart of this dtype of torch."""
        if isinstance(value, int):
            return DType(value)
        for number, dtype in {**TORCH_DTYPES, **TORCH_FP8}.items():
            if dtype is value:
                return DType(number)
        raise ValueError(f"[DType] expected a DType or its counterpart in torch, got {value!r}")


E4M3 = int(DType.kFloat8E4M3)
E5M2 = int(DType.kFloat8E5M2)

FP8_NAMES = {E4M3: "E4M3", E5M2: "E5M2"}
TORCH_DTYPES = {
    int(DType.kByte): torch.uint8,
    int(DType.kInt32): torch.int32,
    int(DType.kFloat32): torch.float32,
    int(DType.kFloat16): torch.float16,
    int(DType.kBFloat16): torch.bfloat16,
}
TORCH_FP8 = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}

HIGH_PRECISION = (torch.float32, torch.float16, torch.bfloat16)


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype of `torch.autocast` on the tensor's device; None where it is off."""
    if not any_autocast_enabled() or x.is_meta:
        return None
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """A context without `torch.autocast` on devices of this type."""
    # torch raises an error if it is asked about meta, which has no autocast.
    if any_autocast_enabled() and device != "meta" and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def in_autocast_dtype(x: torch.Tensor) -> torch.Tensor:
    """The tensor, cast to the dtype of `torch.autocast` where that is on."""
    return x.to(autocast_dtype(x) or x.dtype)
