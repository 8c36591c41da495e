"""FP8 casts, transposes and updates of scales, compared with torch's operators for the same work.

All times are with a cold L2. `ratio` is the time of a copy that moves as many bytes, divided by
ours. Each byte counts as often as it must move: once, but the input of current scaling twice,
because the amax must be known before the cast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import Report, copy_us, of_copy, require_gpu, time_gpu, time_gpu_each, time_graph

from transformer_engine.pytorch.kernels.amax import amax, current_scales
from transformer_engine.pytorch.kernels.cast import cast as plain_cast
from transformer_engine.pytorch.kernels.delayed_scaling import (
    delayed_scaling_update,
    entry,
    gather_amax,
)
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.kernels.quantize import quantize
from transformer_engine.pytorch.kernels.transpose import transpose

E4M3 = 5
SHAPES = [(2048, 2048), (8192, 4096), (16384, 8192)]
LARGE = 2**25  # elements from which on rows are judged by bars
STATES, HISTORY_LENGTHS = 288, (16, 1024)  # a model of 48 layers, six quantised tensors each


@dataclass(frozen=True)
class Operation:
    """A kernel, its bytes per element, its bar, and torch's call for the same result."""

    name: str
    run: Callable[[], object]
    bytes: float
    bar: float | None = None
    torch: Callable[[], object] | None = None


def operations(x: torch.Tensor) -> list[Operation]:
    """All operations on one bf16 matrix."""
    scale, running_amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    scales = torch.ones(2, device="cuda")
    codes = x.to(torch.float8_e4m3fn).view(torch.uint8)
    master = x.float()

    def cast(columnwise: bool, dbias: torch.dtype | None = None) -> Callable[[], object]:
        return lambda: quantize(x, E4M3, scale, running_amax, None, True, columnwise, dbias)

    def current_scaling() -> object:
        found = current_scales(x, E4M3, False, 0.0)
        return quantize(x, E4M3, None, None, found, True, True, None)

    def torch_cast() -> torch.Tensor:
        return (x * scale).to(torch.float8_e4m3fn)

    def torch_cast_transpose() -> tuple[torch.Tensor, torch.Tensor]:
        rowwise = torch_cast().view(torch.uint8)
        return rowwise, rowwise.T.contiguous()

    return [
        Operation("cast", cast(False), 3, 0.95, torch_cast),
        Operation("cast + transpose", cast(True), 4, 0.88, torch_cast_transpose),
        Operation("cast + transpose + dbias", cast(True, torch.bfloat16), 4, 0.86),
        Operation("current scaling, cast + transpose", current_scaling, 6),
        Operation("amax", lambda: amax(x), 2, None, lambda: x.abs().max()),
        Operation("transpose", lambda: transpose(codes), 2, 0.9, codes.T.contiguous),
        Operation(
            "dequantize",
            lambda: dequantize(codes, E4M3, scales, torch.bfloat16),
            3,
            0.9,
            lambda: codes.view(torch.float8_e4m3fn).to(torch.bfloat16) * scales[0],
        ),
        Operation(
            "fp32 to bf16",
            lambda: plain_cast(master, torch.bfloat16),
            6,
            0.95,
            lambda: master.to(torch.bfloat16),
        ),
    ]


def bench_tensors(report: Report) -> None:
    for rows, cols in SHAPES:
        x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
        for operation in operations(x):
            contenders = {"ours": operation.run}
            if operation.torch is not None:
                contenders["torch"] = operation.torch
            times = time_gpu_each(contenders)
            row = {"op": operation.name, "case": f"{rows}x{cols} bf16"}
            row |= of_copy(times["ours"], int(operation.bytes * x.numel()))
            if operation.bar is not None and x.numel() >= LARGE:
                row["bar"] = operation.bar
            if operation.torch is not None:
                row["torch_us"] = round(times["torch"].median_us, 2)
            report.row(**row)


def bench_dtypes(report: Report) -> None:
    """Measure other dtypes of the input, and numbers of rows that tiles do not divide."""
    scale, running_amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    for rows, cols, dtype in [
        (8192, 4096, torch.float32),
        (8192, 4096, torch.float16),
        (8200, 4104, torch.bfloat16),
        (8192, 28672, torch.bfloat16),
    ]:
        x = torch.randn(rows, cols, device="cuda").to(dtype)
        timing = time_gpu(
            lambda x=x: quantize(x, E4M3, scale, running_amax, None, True, True, None)
        )
        nbytes = (x.element_size() + 2) * x.numel()
        name = str(dtype).removeprefix("torch.")
        report.row(op="cast + transpose", case=f"{rows}x{cols} {name}", **of_copy(timing, nbytes))


def bench_delayed_scaling(report: Report) -> None:
    for length in HISTORY_LENGTHS:
        states = [
            (torch.ones(3, device="cuda"), torch.rand(3, length, device="cuda").t())
            for _ in range(STATES)
        ]
        rows = [entry(scale, history) for scale, history in states]
        table = torch.tensor(rows, dtype=torch.int64, device="cuda")
        reduced = torch.rand(3 * STATES, device="cuda")  # not zero: each scale changes
        calls = {
            "delayed update": lambda table=table, reduced=reduced: delayed_scaling_update(
                table, reduced, "max", 448.0, 0
            ),
            "gather amax": lambda table=table: gather_amax(table, 3 * STATES),
        }
        for name, call in calls.items():
            timing = time_graph(call, cold=False)
            report.row(
                op=name,
                case=f"{STATES} states, history {length}",
                us=round(timing.median_us, 2),
                p90_us=round(timing.p90_us, 2),
            )


def main() -> None:
    require_gpu()
    copy_us(2**28)  # warms up until clocks are stable
    report = Report("quantize")
    bench_tensors(report)
    bench_dtypes(report)
    bench_delayed_scaling(report)
    report.save()


if __name__ == "__main__":
    main()
