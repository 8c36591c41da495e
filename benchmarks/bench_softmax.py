"""Softmax and dropout_add, ours and torch eager, relative to a copy of the bytes that must move.

For a causal or windowed softmax, these bytes are the scores inside the window and the whole result.
A mask counts once, even if many heads share it. `ratio` is the time of the copy divided by ours.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from harness import Report, of_copy, require_gpu, time_gpu_each

from transformer_engine.pytorch.kernels.dropout_add import (
    dropout_add_backward,
    dropout_add_forward,
)
from transformer_engine.pytorch.kernels.softmax import softmax_backward, softmax_forward

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from cases import dropout_add as dropout_cases
from cases import softmax as cases

SCALE = 0.125
SOFTMAX_BAR, DROPOUT_BAR = 0.85, 0.90
LARGE = 2**25  # elements from which on rows are judged by bars
LONGEST_ROW = 32768  # keys that fit the registers of a block; longer rows are read twice
ELEMENT = 2  # bytes of bfloat16


def kind_of(case: cases.Case) -> str:
    if case.mask is not None:
        return "masked softmax"
    return "softmax" if case.window == (-1, -1, 0) else "causal softmax"


def seen_scores(case: cases.Case) -> int:
    """The number of scores inside the window."""
    batch, heads, queries, keys = case.shape
    seen = 0
    for query in range(queries):
        center = query + case.diagonal
        first = 0 if case.left < 0 else max(0, center - case.left)
        end = keys if case.right < 0 else min(keys, center + case.right + 1)
        seen += max(0, end - first)
    return batch * heads * seen


def torch_softmax(x: torch.Tensor, hide: torch.Tensor | None) -> torch.Tensor:
    scores = x * SCALE
    return torch.softmax(scores if hide is None else scores.masked_fill(hide, -torch.inf), -1)


def measure_softmax(report: Report, case: cases.Case) -> None:
    x = torch.randn(case.shape, device="cuda", dtype=torch.bfloat16)
    mask = case.make_mask("cuda")
    hide = mask
    if case.right >= 0:
        hide = torch.ones(case.shape[2:], dtype=torch.bool, device="cuda").triu(1 + case.diagonal)
    y = softmax_forward(x, mask, SCALE, *case.window)
    dy = torch.randn_like(x)
    bytes_of = {
        "forward": ELEMENT * (seen_scores(case) + x.numel()) + (0 if mask is None else mask.numel())
    }
    calls = {
        "forward": lambda: softmax_forward(x, mask, SCALE, *case.window),
        "forward torch": lambda: torch_softmax(x, hide),
    }
    if kind_of(case) == "softmax":  # the backward is the same with masks and windows
        bytes_of["backward"] = 3 * ELEMENT * x.numel()
        calls["backward"] = lambda: softmax_backward(dy, y, SCALE)
        calls["backward torch"] = lambda: torch._softmax_backward_data(dy, y, -1, x.dtype)
    keys = case.shape[-1]
    in_registers = keys % 8 == 0 and keys <= LONGEST_ROW
    for name, timing in time_gpu_each(calls).items():
        judged = in_registers and x.numel() >= LARGE and "torch" not in name
        bar = {"bar": SOFTMAX_BAR} if judged else {}
        moved = bytes_of[name.removesuffix(" torch")]
        report.row(op=f"{kind_of(case)} {name}", case=str(case), **bar, **of_copy(timing, moved))


def torch_dropout_add(x, bias, residual, p) -> torch.Tensor:
    return residual + torch.nn.functional.dropout(x + bias, p)


def measure_dropout_add(report: Report, rows: int, cols: int, p: float) -> None:
    x, residual = (torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bias = torch.randn(cols, device="cuda", dtype=torch.bfloat16)
    seed = torch.tensor([1234], device="cuda")
    count = x.numel()
    calls = {
        "forward": (3, lambda: dropout_add_forward(x, bias, residual, seed, p)),
        "forward torch": (3, lambda: torch_dropout_add(x, bias, residual, p)),
        "backward": (2, lambda: dropout_add_backward(x, seed, p, x.dtype, None)),
        "backward dbias": (2, lambda: dropout_add_backward(x, seed, p, x.dtype, bias.dtype)),
    }
    timings = time_gpu_each({name: call for name, (_, call) in calls.items()})
    for name, timing in timings.items():
        bar = {"bar": DROPOUT_BAR} if count >= LARGE and "torch" not in name else {}
        moved = calls[name][0] * ELEMENT * count
        case = f"{rows}x{cols} p={p}"
        report.row(op=f"dropout_add {name}", case=case, **bar, **of_copy(timing, moved))


def main() -> None:
    require_gpu()
    report = Report("softmax")
    for case in cases.BENCHMARK:
        measure_softmax(report, case)
    for rows, cols in dropout_cases.BENCHMARK_SHAPES:
        for p in (0.0, 0.1):
            measure_dropout_add(report, rows, cols, p)
    report.save()


if __name__ == "__main__":
    main()
