"""Environment variables: the only module that reads them, each at the moment it is asked for."""

from __future__ import annotations

import os
from typing import NamedTuple

# A miss through `os.environ.get` costs two exceptions, about 1 us; attention asks on every call.
_VARIABLES: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]


class AttentionVariables(NamedTuple):
    """Which attention backends the user allows.

    Attributes:
        flash: NVTE_FLASH_ATTN, default 1.
        fused: NVTE_FUSED_ATTN, default 1.
        unfused: NVTE_UNFUSED_ATTN, default 1.
        nondeterministic: NVTE_ALLOW_NONDETERMINISTIC_ALGO, default 1; 0 asks for gradients that
            repeat bit for bit.
    """

    flash: bool = True
    fused: bool = True
    unfused: bool = True
    nondeterministic: bool = True


_READ = (
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "NVTE_UNFUSED_ATTN",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "TE_CUBLASLT_PATH",
    "TE_CUDNN_PATH",
    "TE_NCCL_PATH",
)
_NONE_SET = (None, None, None, None)
_DEFAULT = AttentionVariables()


def attention_variables() -> AttentionVariables:
    """Read the variables that choose an attention backend, as they are now."""
    values = (
        _VARIABLES.get(b"NVTE_FLASH_ATTN"),
        _VARIABLES.get(b"NVTE_FUSED_ATTN"),
        _VARIABLES.get(b"NVTE_UNFUSED_ATTN"),
        _VARIABLES.get(b"NVTE_ALLOW_NONDETERMINISTIC_ALGO"),
    )
    if values == _NONE_SET:
        return _DEFAULT
    return AttentionVariables(*(value is None or value.strip() != b"0" for value in values))


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
