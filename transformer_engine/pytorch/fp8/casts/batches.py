"""Casts of several tensors in few launches, for quantizers whose tensors have one scale each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch.fp8.casts.operands import OperandRequest, Operands
from transformer_engine.pytorch.kernels.quantize import quantize_many


def cast_together(
    tensors: list[torch.Tensor],
    requests: Sequence[OperandRequest],
    pairs: list[torch.Tensor],
    scales: list[torch.Tensor],
    amaxes: list[torch.Tensor],
) -> list[Operands]:
    """The operands of tensors of one dtype, for equal sides of one format.

    Args:
        tensors: `[rows, cols]`, contiguous.
        requests: of each.
        pairs: see `kernels.quantize.quantize_many`, as the others.
        scales: of delayed scaling, or none.
        amaxes: that are raised, or none.
    """
    quantizers: list[Any] = [request.quantizer for request in requests]
    codes: list[Any] = [None] * len(tensors)
    transposed = [*codes]
    if requests[0].rowwise:
        codes = [torch.empty_like(x, dtype=torch.uint8) for x in tensors]
    if requests[0].columnwise:
        transposed = [x.new_empty(x.shape[::-1], dtype=torch.uint8) for x in tensors]
    rowwise, columnwise = ([x for x in side if x is not None] for side in (codes, transposed))
    quantize_many(tensors, rowwise, columnwise, pairs, scales, amaxes, quantizers[0].format)
    made = zip(quantizers, codes, transposed, pairs, strict=True)
    return [quantizer.pack(*parts) for quantizer, *parts in made]
