"""Helpers that feature classes of other programs import from here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nvdlfw_inspect import api
from nvdlfw_inspect._engine import schedule_of
from nvdlfw_inspect.utils import frequency, integer
from transformer_engine.debug.session import reduces_weights


def next_enabled_iter(
    start_step: int | None,
    end_step: int | None,
    start_end_list: Sequence[tuple[int, int]] | None,
    freq: int,
    iteration: int,
) -> tuple[bool, int | None]:
    """Whether a schedule runs in an iteration, and the next iteration in which it does.

    Args:
        start_step: the first iteration; None is 0.
        end_step: the last iteration; None and negative numbers are no end.
        start_end_list: first and last iterations of several intervals, in place of the two above.
        freq: the schedule runs in iterations that are divisible by this number.
        iteration: the current iteration.

    Returns:
        `(runs now, next)`; `next` is None if the schedule never runs again.

    Raises:
        TypeError: `freq`, `start_step` or `end_step` is no integer.
        ValueError: `freq` is below 1.

    >>> next_enabled_iter(2, 6, None, 2, 4), next_enabled_iter(2, 6, None, 2, 6)
    ((True, 6), (True, None))
    """
    op = "next_enabled_iter"
    freq = frequency(op, freq)
    start = integer(op, "start_step", start_step or 0)
    whole = (start, -1 if end_step is None else max(integer(op, "end_step", end_step), -1))
    schedule = schedule_of({"freq": freq, "start_end_list": sorted(start_end_list or [whole])})
    return schedule.due(iteration), schedule.next(iteration)


def get_reduction_params(tensor_name: str, tp_group: Any, tp_size: int) -> tuple[bool, Any, bool]:
    """How the built-in features reduce the statistics of a tensor, for features that do the same.

    Args:
        tensor_name: activation, weight, gradient, output, wgrad or dgrad.
        tp_group: tensor parallel group of the layer.
        tp_size: number of ranks of `tp_group`.

    Returns:
        `(skips, group, accumulates)`: whether each rank has statistics of its own; the process
        group that reduces them, where None is all ranks; and whether the micro-batches of a step
        count as one tensor, instead of the first one alone.

    Raises:
        ValueError: no session is running.
    """
    if tensor_name != "weight":
        return False, api.get_tensor_reduction_group(), True
    shared = tp_size > 1 and tp_group is not None and reduces_weights()
    return not shared, tp_group if shared else None, False
