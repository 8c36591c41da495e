"""Merging attention parts, in our kernel and in torch eager, relative to a device copy.

The attention of 8,192 tokens over parts of the keys is merged, and gradients of parts are summed.
Cases are one further part, and all parts of a ring of four ranks: on the last rank, all tokens
attend to every part; on the first rank, only the second half of its tokens attends to the keys of
other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from harness import Report, of_copy, require_gpu, time_gpu_each

from transformer_engine.pytorch.kernels.merge_parts import merge_parts

BAR = 0.85
LARGE = 2**24  # elements from which on a row is judged by the bar
BF16, FP32 = torch.bfloat16, torch.float32


class Case(NamedTuple):
    """Sizes, and how many parts are for all tokens (`wholes`) or the second half (`halves`).

    `fresh`: the result is made from the parts alone; else they are merged into an earlier result.
    """

    batch: int
    tokens: int
    heads: int
    size: int
    dtype: torch.dtype
    wholes: int
    halves: int
    fresh: bool

    def __str__(self) -> str:
        sizes = f"b{self.batch} s{self.tokens} h{self.heads} d{self.size} {str(self.dtype)[6:]}"
        halves = f", {self.halves} of half" if self.halves else ""
        return f"{sizes}, {self.wholes} parts{halves}" + (", from nothing" if self.fresh else "")


CASES = [
    Case(1, 8192, 32, 128, BF16, 1, 0, False),
    Case(1, 8192, 32, 128, FP32, 1, 0, False),
    Case(1, 8192, 32, 128, FP32, 0, 1, False),
    Case(1, 8192, 32, 128, BF16, 4, 0, True),
    Case(1, 8192, 32, 128, BF16, 1, 3, True),
    Case(1, 8192, 32, 128, BF16, 2, 0, True),
    Case(4, 4096, 16, 64, BF16, 4, 0, True),
    Case(1, 2048, 16, 64, BF16, 4, 0, True),
]


def merge_in_torch(
    out: torch.Tensor, sums: torch.Tensor, part: torch.Tensor, part_sums: torch.Tensor
) -> None:
    """Merge one part into an fp32 result by torch's operators, according to the definition."""
    share = torch.sigmoid(part_sums - sums).masked_fill_(part_sums == -torch.inf, 0.0)
    out.lerp_(part.float(), share.unsqueeze(-1))
    sums.copy_(torch.logaddexp(sums, part_sums))


def measure(report: Report, case: Case) -> None:
    shape = (case.batch, case.tokens, case.heads, case.size)
    half = (case.batch, case.tokens // 2, case.heads, case.size)
    shapes = [shape] * case.wholes + [half] * case.halves
    out = torch.randn(shape, device="cuda", dtype=case.dtype)
    sums = torch.randn(shape[:-1], device="cuda")
    parts = [torch.randn(x, device="cuda", dtype=BF16) for x in shapes]
    part_sums = [torch.randn(x[:-1], device="cuda") for x in shapes]
    begins = [0] * case.wholes + [case.tokens // 2] * case.halves
    calls: dict[str, Callable[[], None]] = {
        "attention": lambda: merge_parts(out, sums, parts, part_sums, begins, 1, case.fresh),
        "sum": lambda: merge_parts(out, None, parts, [], begins, 1, case.fresh),
    }
    if case.dtype is FP32 and case.wholes:
        calls["attention torch"] = lambda: merge_in_torch(out, sums, parts[0], part_sums[0])
    rows = (1.0 if case.wholes else 0.5) * (1 if case.fresh else 2)  # reads and writes of `out`
    moved = rows * out.nbytes + sum(x.nbytes for x in parts)
    of_sums = rows * sums.nbytes + sum(x.nbytes for x in part_sums)
    for op, timing in time_gpu_each(calls).items():
        bar = {"bar": BAR} if out.numel() >= LARGE and "torch" not in op else {}
        report.row(
            op=f"merge_parts {op}",
            case=str(case),
            **bar,
            **of_copy(timing, int(moved if op == "sum" else moved + of_sums)),
        )


def main() -> None:
    require_gpu()
    report = Report("merge_parts")
    for case in CASES:
        measure(report, case)
    report.save()


if __name__ == "__main__":
    main()
