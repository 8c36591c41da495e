"""Block scaling: casts relative to a copy, GEMMs relative to torch._scaled_mm on the same codes.

All times are with a cold L2. `ratio` of a cast is the time of a copy that moves as many bytes
divided by ours. `ratio` of a GEMM is torch's time divided by ours, if torch has that GEMM.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from bench_gemm import measure_all
from harness import Report, copy_us, of_copy, require_gpu, time_gpu

from transformer_engine.pytorch.dtypes import E4M3
from transformer_engine.pytorch.kernels.quantize_blocks import quantize_blocks
from transformer_engine.pytorch.scale_layout import block_layout

SHAPES = [(2048, 2048), (8192, 4096), (16384, 8192)]
LARGE = 2**25  # elements from which on a row is judged by a bar
CAST_BAR = 0.8
BF16 = torch.bfloat16


def cast(
    x: torch.Tensor, dimensions: int, columnwise: bool = True, dbias: torch.dtype | None = None
) -> object:
    """Cast to row-wise codes and, if `columnwise`, transposed ones."""
    format = block_layout(dimensions).code(E4M3)
    return quantize_blocks(x, format, True, 0.0, True, columnwise, dbias)


def bench_casts(report: Report) -> None:
    """Bytes that move: input, codes, and scales (for 1 x 128, 4 bytes per 128 codes)."""
    for rows, cols in SHAPES:
        x = torch.randn(rows, cols, device="cuda", dtype=BF16)
        ways: dict[str, tuple[Callable[[], object], float]] = {
            "cast 1x128": (lambda x=x: cast(x, 1, False), 2 + 33 / 32),
            "cast + transpose 1x128": (lambda x=x: cast(x, 1), 2 + 66 / 32),
            "cast + transpose + dbias 1x128": (lambda x=x: cast(x, 1, dbias=BF16), 2 + 66 / 32),
            "cast + transpose 128x128": (lambda x=x: cast(x, 2), 4),
        }
        for name, (call, per_element) in ways.items():
            row = {"op": name, "case": f"{rows}x{cols} bf16"}
            row |= of_copy(time_gpu(call), int(per_element * x.numel()))
            if x.numel() >= LARGE:
                row["bar"] = CAST_BAR
            report.row(**row)


def main() -> None:
    require_gpu()
    torch.manual_seed(0)
    copy_us(2**28)  # warms up until clocks are stable
    report = Report("blocks")
    bench_casts(report)
    measure_all(["fp8 blocks"], report)
    report.save()


if __name__ == "__main__":
    main()
