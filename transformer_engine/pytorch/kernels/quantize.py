"""FP8 quantisation with one scale for the tensor: row-wise, transposed, or both in one pass.

An FP8 GEMM can only sum along the contiguous axis of an operand. So a tensor over whose columns one
GEMM sums, and another over its rows, is needed both as it is and transposed: one kernel writes both
while it reads `x` once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.library import library_op
from transformer_engine.pytorch.kernels.memory import new_empty
from transformer_engine.pytorch.kernels.shapes import rows_of


@library_op()
def quantize(
    x: torch.Tensor,
    format: int,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    scales: torch.Tensor | None,
    rowwise: bool,
    columnwise: bool,
    dbias: torch.dtype | None,
    moments: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    *,
    launch: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Codes of `x`, read as `[rows, cols]` (cols = last size).

    Args:
        x: fp32, fp16 or bf16, contiguous.
        format: value of `DType` (5 = E4M3, 6 = E5M2).
        scale: fp32 `[1]`, delayed scaling; None where `scales` already holds the pair.
        amax: fp32 `[1]`, raised to `max |x|`; may be None.
        scales: fp32 `[2]` = {1/scale, scale} with `scale=None`; None to allocate and write it.
        rowwise: return codes `[..., cols]`.
        columnwise: return the transposed codes `[cols, rows]`.
        dbias: dtype of the column sums of `x`; None for no bias gradient.
        moments: row that the moments of `x` are merged into; see `kernels.moments.moments`.
        active: flag on the device for `moments`.

    Returns:
        `(rowwise, columnwise, scales, dbias)`, None where not asked for; `scales` is None where
        it was given.
    """
    rows, cols = rows_of(x), x.shape[-1]
    codes = new_empty(x, x.shape, torch.uint8) if rowwise else None
    transposed = new_empty(x, (cols, rows), torch.uint8) if columnwise else None
    own_scales = new_empty(x, (2,), torch.float32) if scales is None else None
    bias_grad = new_empty(x, (cols,), dbias) if dbias is not None else None
    if launch:
        pair = own_scales if scales is None else scales
        _C.quantize(x, codes, transposed, pair, scale, amax, format, bias_grad, moments, active)
    return codes, transposed, own_scales, bias_grad


@library_op(writes=("rowwise", "columnwise", "pairs"))
def quantize_many(
    tensors: Sequence[torch.Tensor],
    rowwise: Sequence[torch.Tensor],
    columnwise: Sequence[torch.Tensor],
    pairs: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    amaxes: Sequence[torch.Tensor],
    format: int,
    *,
    launch: bool = True,
) -> None:
    """`quantize` of several tensors in few launches, into given memory. Lists may be empty.

    Args:
        tensors: contiguous, on one device, of one dtype: fp32, fp16 or bf16.
        rowwise: memory for codes, of the shapes of the tensors; or empty.
        columnwise: memory for transposed codes; or empty, but not if `rowwise` is empty, too.
        pairs: fp32 `[2]` = {1/scale, scale}: written from `scales`, or read if that is empty.
        scales: fp32 `[1]`, delayed scaling; or empty.
        amaxes: fp32 `[1]`, raised to the largest magnitudes; or empty.
        format: value of `DType` (5 = E4M3, 6 = E5M2).
    """
    if launch:
        _C.quantize_many(tensors, rowwise, columnwise, pairs, scales, amaxes, format)
