"""An operator that shows a tensor to the debugger's session, for graphs that are compiled."""

from __future__ import annotations

import torch

from transformer_engine.pytorch.fp8.process_state import process_state
from transformer_engine.pytorch.kernels.library import library_op


@library_op(has_side_effects=True)
def show_to_inspector(
    x: torch.Tensor | None,
    row_codes: torch.Tensor | None,
    row_scales: torch.Tensor | None,
    row_format: int,
    column_codes: torch.Tensor | None,
    column_scales: torch.Tensor | None,
    column_format: int,
    feed: str,
    *,
    launch: bool = True,
) -> None:
    """Let the session inspect a tensor and its casts, if it is due when this runs.

    Args:
        x: in high precision, any shape and strides; None for a weight that is kept in FP8.
        row_codes: uint8, the row-wise side; None if it is not FP8.
        row_scales: of these codes.
        row_format: value of `DType`.
        column_codes: the column-wise side, transposed; None if it is not FP8.
        column_scales: of these codes.
        column_format: value of `DType`.
        feed: the session's name of the tensor; another session has no such name.
    """
    inspector = process_state().inspector
    if launch and inspector is not None:
        rowwise = (row_codes, row_scales, row_format)
        inspector.shown(feed, x, rowwise, (column_codes, column_scales, column_format))
