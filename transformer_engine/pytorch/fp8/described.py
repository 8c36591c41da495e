"""Quantizers of compiled code, made of constants that describe them."""

from __future__ import annotations

from typing import Any

from transformer_engine.pytorch.fp8.quantizers import DESCRIBED, GemmQuantizers


def described_gemm(description: Any, columns: Any) -> GemmQuantizers:
    """Quantizers as `GemmQuantizers.description` says.

    Args:
        description: of the six, and of accumulation.
        columns: of scaling state, `GemmColumns`; None without one.
    """
    *six, accumulation = description
    of_each = (*(columns or (None, None, None)), None, None, None)
    made = [DESCRIBED[one[0]].rebuilt(one, own) for one, own in zip(six, of_each, strict=True)]
    gemm = GemmQuantizers(*made)
    gemm.fast_accumulation = accumulation
    return gemm
