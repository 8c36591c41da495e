"""Merging attention over parts of the keys beside torch eager, as fractions of a copy of its bytes.

A part is of all tokens, or of the second half of them: so do ranks that share sequences call it.
"""

from __future__ import annotations

import torch
from harness import Report, of_copy, require_gpu, time_gpu_each

from transformer_engine.pytorch.kernels.merge_attention import merge_attention

BAR = 0.85
LARGE = 2**24  # elements from which the bar holds
# Batch, sequence, heads, size, the dtype of the result, whether the part is of half the sequence.
CASES = [
    (1, 8192, 32, 128, torch.bfloat16, False),
    (1, 8192, 32, 128, torch.bfloat16, True),
    (1, 8192, 32, 128, torch.float32, False),
    (1, 8192, 32, 128, torch.float32, True),
    (4, 4096, 16, 64, torch.bfloat16, False),
    (4, 4096, 16, 64, torch.bfloat16, True),
    (1, 2048, 16, 64, torch.bfloat16, False),
]


def merge_in_torch(
    out: torch.Tensor, sums: torch.Tensor, part: torch.Tensor, part_sums: torch.Tensor
) -> None:
    """The definition by operators of torch, of an fp32 result."""
    share = torch.sigmoid(part_sums - sums).masked_fill_(part_sums == -torch.inf, 0.0)
    out.lerp_(part.float(), share.unsqueeze(-1))
    sums.copy_(torch.logaddexp(sums, part_sums))


def measure(
    report: Report, batch: int, seq: int, heads: int, size: int, dtype: torch.dtype, half: bool
) -> None:
    tokens = seq // 2 if half else seq
    whole = torch.randn(batch, seq, heads, size, device="cuda", dtype=dtype)
    whole_sums = torch.randn(batch, seq, heads, device="cuda")
    out, sums = (x.narrow(1, seq - tokens, tokens) for x in (whole, whole_sums))
    part = torch.randn(batch, tokens, heads, size, device="cuda", dtype=torch.bfloat16)
    part_sums = torch.randn(batch, tokens, heads, device="cuda")
    calls = {"merge_attention": lambda: merge_attention(out, sums, part, part_sums)}
    if dtype is torch.float32:
        calls["merge_attention torch"] = lambda: merge_in_torch(out, sums, part, part_sums)
    moved = sum(x.numel() * x.element_size() for x in (out, out, part, sums, sums, part_sums))
    case = f"b{batch} s{seq} h{heads} d{size} {str(dtype)[6:]}" + (", of half" if half else "")
    for op, timing in time_gpu_each(calls).items():
        bar = {"bar": BAR} if out.numel() >= LARGE and "torch" not in op else {}
        report.row(op=op, case=case, **bar, **of_copy(timing, moved))


def main() -> None:
    require_gpu()
    report = Report("merge_attention")
    for case in CASES:
        measure(report, *case)
    report.save()


if __name__ == "__main__":
    main()
