"""Rebuilds quantizers in compiled code from constants that describe them."""

from __future__ import annotations

from typing import Any

from transformer_engine.pytorch.fp8.casts.quantizers import DESCRIBED, GemmQuantizers


def described_gemm(description: Any, columns: Any) -> GemmQuantizers:
    """Rebuild the quantizers of a GEMM.

    Args:
        description: a `GemmQuantizers.description`.
        columns: `GemmColumns` of scaling state; None without scaling state.
    """
    *six, accumulation = description
    of_each = (*(columns or (None, None, None)), None, None, None)
    made = [DESCRIBED[one[0]].rebuilt(one, own) for one, own in zip(six, of_each, strict=True)]
    gemm = GemmQuantizers(*made)
    gemm.fast_accumulation = accumulation
    return gemm
