"""merge_parts: errors for invalid arguments."""

import pytest
import torch

from transformer_engine import _C


def bad(**changes):
    """Arguments of a valid call of `_C.merge_parts`, with `changes`."""
    shape = (2, 3, 4, 8)
    good = {"out": torch.zeros(shape).bfloat16(), "log_sum_exp": torch.zeros(shape[:-1])}
    good |= {"parts": [good["out"] + 1], "part_log_sum_exps": [torch.zeros(shape[:-1])]}
    return {**good, "begins": [0], "token_axis": 1, "fresh": False, **changes}


ROWS, SUMS = torch.zeros(2, 3, 4, 8).bfloat16(), torch.zeros(2, 3, 4)
ERRORS = {
    "rank": ({"out": ROWS[0, 0]}, ValueError, r"out of shape \(a, b, heads, size\), got \(4, 8\)"),
    "dtype of out": ({"out": ROWS.half()}, TypeError, "float32 or bfloat16 for out, got float16"),
    "dtype": ({"parts": [ROWS.double()]}, TypeError, "bfloat16 for a part, got float64"),
    "narrower out": (
        {"parts": [ROWS.float()]},
        TypeError,
        "float32 or float32 for out, got bfloat16",
    ),
    "two dtypes": (
        {"parts": [ROWS, ROWS.half()], "part_log_sum_exps": [SUMS, SUMS], "begins": [0, 0]},
        TypeError,
        "bfloat16 for a part, got float16",
    ),
    "shape of a part": (
        {"parts": [ROWS[:, :2, :3]]},
        ValueError,
        r"shape \(2, 2, 4, 8\) for a part, got \(2, 2, 3, 8\)",
    ),
    "rank of a part": ({"parts": [ROWS[0]]}, ValueError, "a part of shape .* got \\(3, 4, 8\\)"),
    "strides of out": (
        {"out": torch.zeros(2, 3, 8, 4).mT},
        ValueError,
        "elements of a row of out side by side, got a stride of 4",
    ),
    "strides of a part": (
        {"parts": [ROWS.mT.contiguous().mT]},
        ValueError,
        "elements of a row of a part side by side, got a stride of 4",
    ),
    "sums": ({"log_sum_exp": SUMS.double()}, TypeError, "float32 for log_sum_exp, got float64"),
    "sums of a part": (
        {"part_log_sum_exps": [SUMS.half()]},
        TypeError,
        "float32 for the log_sum_exp of a part, got float16",
    ),
    "shape of sums": (
        {"log_sum_exp": SUMS.transpose(1, 2)},
        ValueError,
        r"shape \(2, 3, 4\) for log_sum_exp, got \(2, 4, 3\)",
    ),
    "rank of sums": (
        {"part_log_sum_exps": [SUMS[0]]},
        ValueError,
        r"shape \(2, 3, 4\) for the log_sum_exp of a part, got \(3, 4\)",
    ),
    "repeated rows": (
        {"out": ROWS[:1].expand(2, 3, 4, 8)},
        ValueError,
        "out to have memory for each element, got .* with a stride of 0 over 1 element$",
    ),
    "repeated sums": (
        {"log_sum_exp": SUMS[:, :, :1].expand(2, 3, 4)},
        ValueError,
        "log_sum_exp to have memory for each element",
    ),
    "no part": ({"parts": []}, ValueError, "1 to 4 parts, got 0"),
    "five parts": ({"parts": [ROWS] * 5}, ValueError, "1 to 4 parts, got 5"),
    "no begin": ({"begins": []}, ValueError, "a begin for each of 1 parts, got 0"),
    "tokens": ({"begins": [1]}, ValueError, "among the 3 of out, got 3 from token 1"),
    "tokens before": ({"begins": [-1]}, ValueError, "among the 3 of out, got 3 from token -1"),
    "axis": ({"token_axis": 2}, ValueError, "a token axis of 0 or 1, got 2"),
    "no sums": ({"log_sum_exp": None}, ValueError, "0 log-sum-exps of parts, got 1"),
    "no sums of parts": ({"part_log_sum_exps": []}, ValueError, "1 log-sum-exps of parts, got 0"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input(name):
    changes, kind, message = ERRORS[name]
    with pytest.raises(kind, match=rf"\[merge_parts\] expected .*{message}"):
        _C.merge_parts(**bad(**changes))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["log_sum_exp", "parts", "part_log_sum_exps"])
def test_another_device(name):
    one = bad()[name]
    changes = {name: [one[0].cuda()] if isinstance(one, list) else one.cuda()}
    with pytest.raises(ValueError, match=r"\[merge_parts\] expected .* on cpu"):
        _C.merge_parts(**bad(**changes))
