"""Casts between dtypes of high precision, which recordings can hold."""

from __future__ import annotations

import torch

from transformer_engine import _C

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_is_compiling = torch.compiler.is_compiling


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x.to(dtype)`, where that computes something by a kernel of ours; no gradient passes.

    Compilers fuse torch's own cast, and subclasses of tensors have casts of theirs.

    Args:
        x: fp32, fp16 or bf16.
        dtype: one of them.
    """
    if x.dtype is dtype:
        return x
    if _is_compiling() or type(x) not in _PLAIN_TYPES or x.is_meta or not x.is_contiguous():
        return x.to(dtype)
    y = torch.empty_like(x, dtype=dtype)
    _C.cast(x, y)
    return y
