"""Casts several tensors in few launches, for quantizers with one scale for each tensor."""

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
    """Cast tensors of one dtype, with requests for the same sides and format.

    Args:
        tensors: `[rows, cols]`, contiguous.
        requests: one for each tensor.
        pairs: fp32 `[2]` each, {1/scale, scale}; see `kernels.quantize.quantize_many`.
        scales: scales of delayed scaling, from which the kernel writes `pairs`; an empty list if
            `pairs` already have values.
        amaxes: fp32 `[1]` each, raised to the amaxes of the tensors; may be empty.
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
