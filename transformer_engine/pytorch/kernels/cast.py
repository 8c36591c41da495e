"""Casts between dtypes of high precision, by a kernel that recordings can contain."""

from __future__ import annotations

import torch

from transformer_engine import _C
from transformer_engine.pytorch.plain_tensors import PLAIN_TYPES

_is_compiling = torch.compiler.is_compiling


def cast(x: torch.Tensor, dtype: torch.dtype, factor: torch.Tensor | None = None) -> torch.Tensor:
    """`x.to(dtype)` by a kernel of ours, through which no gradient passes.

    In compiled code and for tensor subclasses it is torch's own cast: compilers fuse that, and
    subclasses redefine it.

    Args:
        x: fp32, fp16 or bf16.
        dtype: one of these three.
        factor: fp32 `[1]`, by which values are multiplied in fp32 before they are rounded.
    """
    if x.dtype is dtype and factor is None:
        return x
    if _is_compiling() or type(x) not in PLAIN_TYPES or x.is_meta or not x.is_contiguous():
        return (x if factor is None else x.float() * factor).to(dtype)
    y = torch.empty_like(x, dtype=dtype)
    _C.cast(x, y, factor)
    return y
