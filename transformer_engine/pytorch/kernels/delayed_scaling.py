"""The end-of-step update of all delayed-scaling states of a model.

States are named by a table, int64 `[states, 5]` on their device: one row per state with the
address of its history fp32 `[length, count]`, the address of its scale fp32 `[count]`, length,
count, and the stride between columns of both; rows follow each other. The caller keeps histories
and scales alive and at these addresses.
"""

from __future__ import annotations

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.library import library_op

_MOST_RECENT = {"max": False, "most_recent": True}


@library_op(
    "delayed_scaling_update(Tensor(a!) table, Tensor? reduced, str algorithm, float fp8_max,"
    " int margin) -> ()"
)
def delayed_scaling_update(
    table: torch.Tensor,
    reduced: torch.Tensor | None,
    algorithm: str,
    fp8_max: float,
    margin: int,
    *,
    launch: bool = True,
) -> None:
    """Compute every scale from its amax history and roll the histories, in one launch.

    A column whose newest amax (row 0) is zero did not run and stays as it is.

    Args:
        table: see the module's docstring. The memory it points at is written to; its own entries
            are not (the schema marks it as written so that compilers keep the call in its place).
        reduced: fp32 `[columns]`, `gather_amax` reduced over ranks, which then stands for row 0;
            None on a single rank.
        algorithm: `"max"` over the history or `"most_recent"`.
        fp8_max: largest finite value of the format.
        margin: scales are divided by `2**margin`.
    """
    if algorithm not in _MOST_RECENT:
        raise ValueError(
            "[delayed_scaling_update] expected 'max' or 'most_recent' for algorithm,"
            f" got {algorithm!r}"
        )
    if launch:
        _C.delayed_scaling_update(table, reduced, _MOST_RECENT[algorithm], fp8_max, margin)


@library_op("gather_amax(Tensor table, int columns) -> Tensor")
def gather_amax(table: torch.Tensor, columns: int, *, launch: bool = True) -> torch.Tensor:
    """Row 0 of every history of the table, as fp32 `[columns]`, in table order."""
    out = table.new_empty(columns, dtype=torch.float32)
    if launch:
        _C.gather_amax(table, out)
    return out
