"""Statistics of a tensor: one kernel for all of them, and their cost as an epilogue of other ops.

"all statistics" is judged in microseconds. The L2 is flushed by reading before it, so that no dirty
lines must be written back. Further fields of the row: `copied_us` is the time of a device copy that
moves as many bytes; `behind_writes_us` our time after the usual flush by writing, which leaves the
L2 full of dirty lines; `inactive_us` our time if the flag of the row is zero; `torch_us` the time
of the calls that torch needs. In "epilogue" rows, `ratio` is the time of an op with moments divided
by that without.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import FLUSH_BYTES, Report, Timing, copy_us, require_gpu, time_gpu_each

from transformer_engine.pytorch.kernels.activation import (
    activation_backward,
    activation_forward,
    activation_kind,
)
from transformer_engine.pytorch.kernels.moments import (
    cast_moments,
    empty_cast_moments,
    empty_moments,
    moments,
)
from transformer_engine.pytorch.kernels.norm import RMS_NORM, norm_forward
from transformer_engine.pytorch.kernels.quantize import quantize

E4M3 = 5
SHAPES = [(2048, 2048), (8192, 4096), (16384, 8192)]
JUDGED = (8192, 4096)
BAR_US = 18.0
BF16 = torch.bfloat16


def torch_statistics(x: torch.Tensor) -> list[torch.Tensor]:
    """Seven statistics with a call for each, as a debugger without its own kernel computes them."""
    wide = x.float()
    return [
        x.min(),
        x.max(),
        x.abs().max(),
        wide.mean(),
        wide.std(),
        wide.norm(1),
        wide.norm(2),
    ]


def time_clean(call: Callable[[], object], repeats: int = 50, warmup: int = 20) -> Timing:
    """GPU time of a call after a flush by reading, which leaves no dirty lines in the L2."""
    flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
    samples = []
    for _ in range(warmup + repeats):
        flush.amax()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        samples.append((start, end))
    torch.cuda.synchronize()
    return Timing.of([start.elapsed_time(end) * 1e3 for start, end in samples[warmup:]])


def bench_tensor(report: Report, shape: tuple[int, int], dtype: torch.dtype = BF16) -> None:
    x = torch.randn(shape, device="cuda").to(dtype)
    row, idle = empty_moments("cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    clean = time_clean(lambda: moments(x, row))
    written = time_gpu_each(
        {
            "ours": lambda: moments(x, row),
            "idle": lambda: moments(x, row, idle),
            "torch": lambda: torch_statistics(x),
        }
    )
    judged = shape == JUDGED and dtype == BF16
    report.row(
        op="all statistics",
        case=f"{shape[0]}x{shape[1]} {str(dtype).removeprefix('torch.')}",
        us=round(clean.median_us, 2),
        p10_us=round(clean.p10_us, 2),
        p90_us=round(clean.p90_us, 2),
        tb_per_s=round(x.nbytes / clean.median_us * 1e-6, 3),
        better="lower",
        copied_us=round(copy_us(x.nbytes), 2),
        behind_writes_us=round(written["ours"].median_us, 2),
        inactive_us=round(written["idle"].median_us, 2),
        torch_us=round(written["torch"].median_us, 2),
        **({"ratio": round(clean.median_us, 2), "bar": BAR_US} if judged else {}),
    )


def bench_cast(report: Report, shape: tuple[int, int]) -> None:
    """Measure statistics of casts; "cast counts" reads codes, and `x` only if a code is unclear."""
    x = torch.randn(shape, device="cuda", dtype=BF16)
    row, scale = empty_cast_moments("cuda"), 448 / x.abs().amax().float().reshape(1)
    codes, _, scales, _ = quantize(x, E4M3, scale, None, None, True, False, None)
    for name, squared_error in (("cast statistics", True), ("cast counts", False)):
        clean = time_clean(
            lambda errors=squared_error: cast_moments(
                x, codes, scales, E4M3, row, squared_error=errors
            )
        )
        nbytes = (3 if squared_error else 1) * x.numel()
        report.row(
            op=name,
            case=f"{shape[0]}x{shape[1]} bfloat16",
            us=round(clean.median_us, 2),
            tb_per_s=round(nbytes / clean.median_us * 1e-6, 3),
            copied_us=round(copy_us(nbytes), 2),
        )


def bench_epilogues(report: Report, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device="cuda", dtype=BF16)
    gamma = torch.ones(shape[1], device="cuda", dtype=BF16)
    scale, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    fp8 = {"scale": scale, "amax": amax, "rowwise": True, "columnwise": True}
    row = empty_moments("cuda")
    gelu = activation_kind("gelu")

    def cast(columnwise: bool, dbias: torch.dtype | None = None) -> Callable[..., object]:
        return lambda **more: quantize(x, E4M3, scale, amax, None, True, columnwise, dbias, **more)

    ops: dict[str, Callable[..., object]] = {
        "cast": cast(False),
        "cast + transpose": cast(True),
        "cast + transpose + dbias": cast(True, BF16),
        "rmsnorm": lambda **more: norm_forward(x, gamma, None, RMS_NORM, 1e-5, False, BF16, **more),
        "rmsnorm fp8": lambda **more: norm_forward(
            x, gamma, None, RMS_NORM, 1e-5, False, None, **fp8, **more
        ),
        "gelu fp8": lambda **more: activation_forward(x, gelu, False, **fp8, **more),
        "gelu backward fp8": lambda **more: activation_backward(
            x, x, gelu, False, **fp8, dbias=BF16, **more
        ),
    }
    for name, op in ops.items():
        times = time_gpu_each({"without": op, "with": lambda op=op: op(moments=row)})
        report.row(
            op=f"epilogue of {name}",
            case=f"{shape[0]}x{shape[1]} bfloat16",
            us=round(times["with"].median_us, 2),
            without_us=round(times["without"].median_us, 2),
            ratio=round(times["with"].median_us / times["without"].median_us, 3),
            better="lower",
        )


def main() -> None:
    require_gpu()
    copy_us(2**28)  # warms up until clocks are stable
    report = Report("statistics")
    for shape in SHAPES:
        bench_tensor(report, shape)
        bench_cast(report, shape)
    bench_tensor(report, JUDGED, torch.float32)
    bench_tensor(report, JUDGED, torch.float16)
    for shape in SHAPES[:2]:
        bench_epilogues(report, shape)
    report.save()


if __name__ == "__main__":
    main()
