"""FP8 and bf16 GEMMs relative to torch._scaled_mm and torch.mm: GPU time, epilogues, host time.

`ratio` is torch's time divided by ours, measured in turns on the same random data with a cold L2.
TE_GEMM_TUNE=1 first tunes every GEMM (see tune_gemm.py), so that the rows show the times with the
table of algorithms that the tuner writes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import torch
from gemm_cases import Case, cases, prepare
from harness import Report, require_gpu, time_gpu_each, time_host_each
from tune_gemm import TABLE, tune_all

from transformer_engine.pytorch.kernels.gemm import gemm, gemm_into

HOST_SIZE = 256  # so small that the host never waits for the GPU


def measure(case: Case, report: Report) -> float | None:
    """Measure a GEMM; returns torch's time divided by ours, None if torch has no such GEMM."""
    timings = time_gpu_each(prepare(case).all(), repeats=30, warmup=10)
    ours, peer = timings["ours"], timings.get("torch")
    row = {
        "op": case.op,
        "case": case.label,
        "us": round(ours.median_us, 2),
        "p10_us": round(ours.p10_us, 2),
        "p90_us": round(ours.p90_us, 2),
        "tflop_per_s": round(case.flop / ours.median_us * 1e-6, 1),
    }
    if peer is None:
        report.row(**row)
        return None
    ratio = peer.median_us / ours.median_us
    report.row(**row, torch_us=round(peer.median_us, 2), ratio=round(ratio, 3), bar=1.0)
    return ratio


def measure_all(precisions: Sequence[str], report: Report) -> None:
    """Measure every case, and the geometric mean of the ratios for each precision."""
    for precision in precisions:
        ratios = [measure(case, report) for case in cases([precision])]
        mean = geometric_mean([ratio for ratio in ratios if ratio is not None])
        report.row(op=precision, case="geometric mean", ratio=round(mean, 3), bar=1.03)


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


Ways = tuple[Callable[[], object], Callable[[], object], Callable[[], object]]


def ways_of(tokens: int, outputs: int, inputs: int) -> dict[str, Ways]:
    """For each epilogue: the plain GEMM, our GEMM with the epilogue, and torch's calls for it."""
    bf16 = torch.bfloat16
    x = torch.randn(tokens, inputs, device="cuda", dtype=bf16)
    w = torch.randn(outputs, inputs, device="cuda", dtype=bf16)
    dy = torch.randn(tokens, outputs, device="cuda", dtype=bf16)
    bias = torch.randn(outputs, device="cuda", dtype=bf16)
    main_grad = torch.zeros(outputs, inputs, device="cuda")
    wgrad = {"a_transposed": True, "b_transposed": True}
    return {
        "fprop + bias": (
            lambda: gemm(x, w, bf16),
            lambda: gemm(x, w, bf16, bias=bias),
            lambda: torch.addmm(bias, x, w.t()),
        ),
        "wgrad into fp32": (
            lambda: gemm(dy, x, bf16, **wgrad),
            lambda: gemm_into(main_grad, dy, x, **wgrad),
            lambda: main_grad.add_(torch.mm(dy.t(), x)),
        ),
    }


def additions(report: Report) -> None:
    """Measure the cost of a bias and of accumulation in fp32, and torch's time for the same."""
    sizes = (16384, 16384, 4096)
    for name, (plain, ours, peer) in ways_of(*sizes).items():
        timings = time_gpu_each({"plain": plain, "ours": ours, "torch": peer}, repeats=20)
        us = {key: timing.median_us for key, timing in timings.items()}
        report.row(
            op=f"bf16 {name}",
            case="x".join(map(str, sizes)),
            us=round(us["ours"], 2),
            torch_us=round(us["torch"], 2),
            over_plain=round(us["ours"] / us["plain"], 3),
            ratio=round(us["torch"] / us["ours"], 3),
        )


def host(report: Report) -> None:
    """Measure the host time of a call, and of torch's call for the same GEMM."""
    bf16 = torch.bfloat16
    x = torch.randn(HOST_SIZE, HOST_SIZE, device="cuda", dtype=bf16)
    w = torch.randn_like(x)
    bias = torch.zeros(HOST_SIZE, device="cuda", dtype=bf16)
    scales = torch.ones(2, device="cuda")
    x_fp8, w_fp8 = (t.to(torch.float8_e4m3fn) for t in (x, w))
    x_codes, w_codes = (t.view(torch.uint8) for t in (x_fp8, w_fp8))
    timings = time_host_each(
        {
            "bf16": lambda: gemm(x, w, bf16),
            "torch.mm": lambda: torch.mm(x, w.t()),
            "bf16 + bias": lambda: gemm(x, w, bf16, bias=bias),
            "linear": lambda: torch.nn.functional.linear(x, w, bias),
            "fp8": lambda: gemm(x_codes, w_codes, bf16, scales, scales, 5, 5),
            "scaled_mm": lambda: torch._scaled_mm(
                x_fp8, w_fp8.t(), scales[:1], scales[:1], out_dtype=bf16
            ),
        }
    )
    for ours, peer in (("bf16", "torch.mm"), ("bf16 + bias", "linear"), ("fp8", "scaled_mm")):
        report.row(
            op=f"host {ours}",
            case=f"{HOST_SIZE}^3",
            us=round(timings[ours].median_us, 2),
            torch_us=round(timings[peer].median_us, 2),
            ratio=round(timings[peer].median_us / timings[ours].median_us, 3),
        )


def main() -> None:
    """Measures all cases, then the host."""
    require_gpu()
    torch.manual_seed(0)
    if os.environ.get("TE_GEMM_TUNE") == "1":
        tune_all(list(cases()), seconds=2.0, out=TABLE)
    report = Report("gemm")
    measure_all(["fp8", "bf16"], report)
    additions(report)
    host(report)
    report.save()


if __name__ == "__main__":
    main()
