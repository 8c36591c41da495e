"""The end-of-step update of all delayed-scaling states of a model.

A table, int64 `[states, 6]` on the device of the states, lists the addresses, sizes and strides of
all histories and scales, so that one launch finds them. `entry` makes a row of it. The caller keeps
histories and scales alive and at their addresses.
"""

from __future__ import annotations

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.library import library_op

_MOST_SPREAD = 1024  # elements: a larger number is a mistake, and would waste memory
_MOST_RECENT = {"max": False, "most_recent": True}


def entry(scale: torch.Tensor, amax_history: torch.Tensor) -> list[int]:
    """The row of a state in the table.

    Args:
        scale: fp32 `[count]`.
        amax_history: fp32 `[length, count]`; the elements of a column are adjacent in memory.
    """
    addresses = [amax_history.data_ptr(), scale.data_ptr()]
    return [*addresses, *amax_history.shape, amax_history.stride(1), scale.stride(0)]


def _is_most_recent(op: str, algorithm: str) -> bool:
    if algorithm not in _MOST_RECENT:
        raise ValueError(f"[{op}] expected 'max' or 'most_recent' for algorithm, got {algorithm!r}")
    return _MOST_RECENT[algorithm]


@library_op(writes=("table",))
def delayed_scaling_update(
    table: torch.Tensor,
    reduced: torch.Tensor | None,
    algorithm: str,
    fp8_max: float,
    margin: int,
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    *,
    launch: bool = True,
) -> None:
    """Compute every scale from its amax history and roll the histories, in one launch.

    A column whose newest amax (row 0) is zero did not run and stays as it is.

    Args:
        table: see the module's docstring. The memory it points at is written to; its own entries
            are not (the schema marks it as written so that compilers keep the call in its place).
        reduced: fp32 `[columns]`: the results of `gather_amax` reduced over ranks, which are used
            in place of row 0; None on a single rank.
        algorithm: `"max"` over the history or `"most_recent"`.
        fp8_max: largest finite value of the format.
        margin: scales are divided by `2**margin`.
        amax: fp32 `[columns]`: amaxes that a recipe's own function has computed, used in place of
            `algorithm`; may be None.
        scale: fp32 `[columns]`: scales that a recipe's own function has computed, used in place of
            `fp8_max / amax / 2**margin`; may be None.
    """
    most_recent = _is_most_recent("delayed_scaling_update", algorithm)
    if launch:
        _C.delayed_scaling_update(table, reduced, most_recent, fp8_max, margin, amax, scale)


@library_op()
def gather_amax(
    table: torch.Tensor,
    columns: int,
    reduced: torch.Tensor | None = None,
    algorithm: str = "most_recent",
    *,
    launch: bool = True,
) -> torch.Tensor:
    """The amaxes that `delayed_scaling_update` uses, fp32 `[columns]`, in the order of the table.

    With the default arguments they are those of row 0, which ranks then reduce. For `reduced` and
    `algorithm` see `delayed_scaling_update`.
    """
    most_recent = _is_most_recent("gather_amax", algorithm)
    out = table.new_empty(columns, dtype=torch.float32)
    if launch:
        _C.gather_amax(table, reduced, most_recent, out)
    return out


@library_op()
def spread(
    scale: torch.Tensor, amax_history: torch.Tensor, multiple: int, *, launch: bool = True
) -> torch.Tensor:
    """Memory of a new state: a row for each column, with its scale first, then its history.

    This is one operator, so that a graph that recomputes a part makes the state only once. If
    operators of torch copied the values into the memory, amaxes would be written to other memory.

    Args:
        scale: fp32 `[count]`.
        amax_history: fp32 `[length, count]`.
        multiple: scale and history begin at multiples of so many elements, at most 1024.
    """
    if not 1 <= multiple <= _MOST_SPREAD:
        raise ValueError(f"[spread] expected a multiple of 1 to {_MOST_SPREAD}, got {multiple}")
    length, count = amax_history.shape
    room = scale.new_zeros(count, multiple - (-length // multiple) * multiple)
    if launch:
        room[:, 0].copy_(scale)
        room[:, multiple : multiple + length].copy_(amax_history.t())
    return room
