"""Statistics of tensors: rows of moments that merge over micro-batches, blocks and ranks.

A row lies on the device and is merged into by every call, so that nothing comes to the host until
someone wants the numbers. Its fields are those of `csrc/core/moments.h`; `statistics` and
`cast_statistics` turn them into what people read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.library import library_op

MOMENTS = (
    "count",
    "mean",
    "m2",  # sum of squared deviations from the mean
    "sum_abs",
    "sum_squares",
    "min",
    "max",
    "amax",
    "smallest",  # non-zero magnitude; inf if there is none
    "nonzeros",
    "nans",
    "infs",
)
CAST_MOMENTS = (
    "count",
    "underflows",  # x != 0 and its code is a zero
    "overflows",  # |x| > fp8_max * scale_inv
    "squared_error",
    "min_scale_inv",
    "max_scale_inv",
)
CAST_MOMENTS_FIELDS = 8  # some are reserved
# What a row holds before anything was merged into it.
EMPTY_MOMENTS = (0.0,) * 5 + (math.inf, -math.inf, 0.0, math.inf) + (0.0,) * 7
EMPTY_CAST_MOMENTS = (0.0,) * 4 + (math.inf,) + (0.0,) * 3


def empty_moments(device: torch.device | str | None = None) -> torch.Tensor:
    """A fresh row for `moments`, float64 `[16]`."""
    return torch.tensor(EMPTY_MOMENTS, dtype=torch.float64, device=device)


def empty_cast_moments(device: torch.device | str | None = None) -> torch.Tensor:
    """A fresh row for `cast_moments`, float64 `[8]`."""
    return torch.tensor(EMPTY_CAST_MOMENTS, dtype=torch.float64, device=device)


@library_op(has_side_effects=True)
def moments(
    x: torch.Tensor, row: torch.Tensor, active: torch.Tensor | None = None, *, launch: bool = True
) -> None:
    """Merge the moments of `x` into `row`, in one pass over `x`.

    Args:
        x: fp32, fp16 or bf16, contiguous, any shape.
        row: float64 `[16]`, see `empty_moments`; written to.
        active: int32 `[1]` on the device; where it holds 0, nothing happens. None: always.

    Example:
        >>> row = empty_moments(x.device)
        >>> moments(x, row)
        >>> statistics(row.tolist())["std"]
    """
    if launch:
        merge_moments(x, row, active)


def merge_moments(
    x: torch.Tensor | None, row: torch.Tensor | None, active: torch.Tensor | None
) -> None:
    """`moments` within another op, which names `row` and `active` in its own schema."""
    if row is not None and x is not None:
        _C.moments(x, row, active)


@library_op(has_side_effects=True)
def cast_moments(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    format: int,
    row: torch.Tensor,
    active: torch.Tensor | None = None,
    squared_error: bool = True,
    *,
    launch: bool = True,
) -> None:
    """Merge what a cast to FP8 has done to `x` into `row`.

    Args:
        x: fp32, fp16 or bf16, contiguous, any shape.
        codes: its one-byte codes, row-wise, shape of `x`.
        scales: fp32 `[2]` = {1/scale, scale} of the cast.
        format: value of `DType` (5 = E4M3, 6 = E5M2).
        row: float64 `[8]`, see `empty_cast_moments`; written to.
        active: as in `moments`.
        squared_error: False leaves the row's `squared_error` NaN. Counts then come from the codes;
            a value is only read if its code does not tell whether it under- or overflowed.
    """
    if launch:
        _C.cast_moments(x, codes, scales, format, row, active, squared_error)


@library_op(writes=("into",))
def merge_rows(
    rows: torch.Tensor,
    kinds: torch.Tensor,
    into: torch.Tensor,
    active: torch.Tensor | None = None,
    *,
    launch: bool = True,
) -> None:
    """Merge rows of several micro-batches or ranks, in this order.

    Args:
        rows: float64 `[n, slots, 16]`, contiguous; see `csrc/core/moments.h`.
        kinds: int64 `[slots]`: 0 for rows of `moments`, 1 of `cast_moments`, 2 of blocks (their
            count, and the largest dynamic range of one).
        into: float64 `[slots, 16]`, contiguous; written to.
        active: as in `moments`.
    """
    if launch:
        _C.merge_rows(rows, kinds, into, active)


def statistics(row: Sequence[float]) -> dict[str, float]:
    """The statistics of a row of `moments`; NaN for those that are not defined.

    Args:
        row: the fields of `MOMENTS`, on the host: `row.tolist()` of the tensor.

    Returns:
        min, max, mean, std (unbiased), l1_norm, l2_norm, cur_amax, dynamic_range.
    """
    return _C.statistics(list(row))


def cast_statistics(row: Sequence[float]) -> dict[str, float]:
    """The statistics of a row of `cast_moments`; NaN for an empty one.

    Args:
        row: the fields of `CAST_MOMENTS`, on the host.

    Returns:
        underflows% and overflows% (of all elements), mse, scale_inv_min, scale_inv_max.
    """
    return _C.cast_statistics(list(row))
