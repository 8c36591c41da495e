"""FP8 quantisation with a scale for each block of 128 or 128 x 128 values."""

from __future__ import annotations

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.library import library_op
from transformer_engine.pytorch.kernels.moments import merge_moments
from transformer_engine.pytorch.kernels.shapes import rows_of
from transformer_engine.pytorch.scale_layout import layout_of


@library_op()
def quantize_blocks(
    x: torch.Tensor,
    format: int,
    power_of_2: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
    dbias: torch.dtype | None,
    moments: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    *,
    launch: bool = True,
) -> tuple[
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
]:
    """Codes of `x`, read as `[rows, cols]` (cols = last size), and the inverse scales of blocks.

    Args:
        x: fp32, fp16 or bf16, contiguous.
        format: element type and layout, see `ScaleLayout.code`.
        power_of_2: round scales down to powers of two.
        epsilon: lower bound of the amax.
        rowwise: return codes and their scales.
        columnwise: return transposed codes and their scales.
        dbias: dtype of the column sums of `x`; None for no bias gradient.
        moments: row that the moments of `x` are merged into; see `kernels.moments.moments`.
        active: flag on the device for `moments`.

    Returns:
        `(rowwise, row_scales, columnwise, column_scales, dbias)`, None where not asked for: codes
        `[..., cols]`, the inverse scales of their blocks, the transposed codes `[cols, rows]` with
        blocks along their own rows, the inverse scales of these, and the column sums.
    """
    rows, cols, layout = rows_of(x), x.shape[-1], layout_of(format)
    codes = scales = transposed = column_scales = None
    if rowwise:
        codes = torch.empty_like(x, dtype=torch.uint8)
        scales = x.new_empty(layout.scale_shape(rows, cols), dtype=layout.scale_dtype)
    if columnwise:
        transposed = x.new_empty((cols, rows), dtype=torch.uint8)
        column_scales = x.new_empty(layout.scale_shape(cols, rows), dtype=layout.scale_dtype)
    bias_grad = x.new_empty(cols, dtype=dbias) if dbias is not None else None
    if launch:
        _C.quantize_blocks(
            x, codes, scales, transposed, column_scales, format, power_of_2, epsilon, bias_grad
        )
        merge_moments(x, moments, active)
    return codes, scales, transposed, column_scales, bias_grad
