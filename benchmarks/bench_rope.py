"""Rotary position embedding of queries, ours and torch eager, relative to a device copy.

`ratio` is the time of a device copy of as many bytes, divided by the time of the embedding.
"""

from __future__ import annotations

import torch
from harness import Report, of_copy, require_gpu, time_gpu_each

from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb
from transformer_engine.pytorch.kernels.rope import rope

BAR = 0.85
LARGE = 2**24  # elements from which on a row is judged by the bar
# Sequence, batch, heads, size of a head, whether the batch is first, whether pairs are adjacent.
CASES = [
    (4096, 4, 32, 128, False, False),
    (4096, 4, 32, 128, True, False),
    (8192, 2, 32, 128, False, True),
    (2048, 8, 32, 64, False, False),
    (4096, 4, 8, 128, False, False),
    (1024, 8, 12, 64, False, False),
]


def measure(
    report: Report, seq: int, batch: int, heads: int, size: int, batch_first: bool, side: bool
) -> None:
    shape = (batch, seq, heads, 3 * size) if batch_first else (seq, batch, heads, 3 * size)
    query = torch.randn(shape, device="cuda", dtype=torch.bfloat16)[..., :size]
    freqs = RotaryPositionEmbedding(size, interleaved=side).cuda()(seq)
    table = freqs.view(seq, size)
    grad = torch.randn(query.shape, device="cuda", dtype=torch.bfloat16)
    form = "bshd" if batch_first else "sbhd"
    calls = {
        "rope forward": lambda: rope(query, table, None, None, batch_first, side, False),
        "rope backward": lambda: rope(grad, table, None, None, batch_first, side, True),
        "rope torch": lambda: apply_rotary_pos_emb(query, freqs, form, interleaved=side),
    }
    case = f"{form} s{seq} b{batch} h{heads} d{size}" + (" interleaved" if side else "")
    for op, timing in time_gpu_each(calls).items():
        bar = {"bar": BAR} if query.numel() >= LARGE and op != "rope torch" else {}
        report.row(op=op, case=case, **bar, **of_copy(timing, 2 * 2 * query.numel()))


def main() -> None:
    require_gpu()
    report = Report("rope")
    for case in CASES:
        measure(report, *case)
    report.save()


if __name__ == "__main__":
    main()
