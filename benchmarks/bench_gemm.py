"""FP8 and bf16 products against torch._scaled_mm and torch.mm: GPU, epilogues, host.

`ratio` is torch's time over ours, measured in turns on the same random data from cold L2.
TE_GEMM_TUNE=1 first tunes every product (see tune_gemm.py), so that the rows below show what the
table that it writes will give.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gemm_cases import Case, cases, prepare
from harness import Report, require_gpu, time_gpu_each, time_host_each
from tune_gemm import TABLE, tune_all

from transformer_engine.pytorch.kernels.gemm import GELU, GELU_BACKWARD, gemm, gemm_into

HOST_SIZE = 256  # small enough that the GPU never holds the host up


def measure(case: Case, report: Report) -> float | None:
    """Torch's time over ours for one product; None where torch has none."""
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
    """Every case, and the geometric mean of the ratios of a precision."""
    for precision in precisions:
        ratios = [measure(case, report) for case in cases([precision])]
        mean = geometric_mean([ratio for ratio in ratios if ratio is not None])
        report.row(op=precision, case="geometric mean", ratio=round(mean, 3), bar=1.03)


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


Ways = tuple[Callable[[], object], Callable[[], object], Callable[[], object]]


def epilogue_ways(tokens: int, outputs: int, inputs: int) -> dict[str, Ways]:
    """Per epilogue: the plain product, ours with the epilogue, torch's way to the same."""
    bf16 = torch.bfloat16
    x = torch.randn(tokens, inputs, device="cuda", dtype=bf16)
    w = torch.randn(outputs, inputs, device="cuda", dtype=bf16)
    dy = torch.randn(tokens, outputs, device="cuda", dtype=bf16)
    argument = torch.randn_like(dy)
    bias = torch.randn(outputs, device="cuda", dtype=bf16)
    main_grad = torch.zeros(outputs, inputs, device="cuda")
    both = {"a_transposed": True, "b_transposed": True}
    backward = {"activation": GELU_BACKWARD, "aux": argument}

    def gelu(t: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(t, approximate="tanh")

    def gelu_backward(t: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.gelu_backward(t, argument, approximate="tanh")

    def fprop(**options: Any) -> Callable[[], object]:
        return lambda: gemm(x, w, bf16, **options)

    def wgrad(**options: Any) -> Callable[[], object]:
        return lambda: gemm(dy, x, bf16, **both, **options)

    def torch_dgrad() -> torch.Tensor:
        return gelu_backward(torch.mm(x, w.t()))

    def into_fp32() -> None:
        gemm_into(main_grad, dy, x, **both)

    return {
        "fprop + bias": (fprop(), fprop(bias=bias), lambda: torch.addmm(bias, x, w.t())),
        "fprop + bias + gelu": (
            fprop(),
            fprop(bias=bias, activation=GELU),
            lambda: gelu(torch.addmm(bias, x, w.t())),
        ),
        "product * gelu'": (fprop(), fprop(**backward), torch_dgrad),
        "product * gelu' + bias gradient": (
            fprop(),
            fprop(**backward, bias_grad=bf16),
            lambda: torch_dgrad().sum(0),
        ),
        "wgrad + bias gradient": (
            wgrad(),
            wgrad(bias_grad=bf16),
            lambda: (torch.mm(dy.t(), x), dy.sum(0)),
        ),
        "wgrad into fp32": (wgrad(), into_fp32, lambda: main_grad.add_(torch.mm(dy.t(), x))),
    }


def epilogues(report: Report) -> None:
    """What the bf16 epilogues of the library cost over the plain product, and what torch's do."""
    sizes = (16384, 16384, 4096)
    for name, (plain, ours, peer) in epilogue_ways(*sizes).items():
        try:
            timings = time_gpu_each({"plain": plain, "ours": ours, "torch": peer}, repeats=20)
        except NotImplementedError as error:
            report.row(op=f"bf16 {name}", case="not in the library", error=str(error))
            continue
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
    """Host microseconds of one call, next to torch's for the same product."""
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
    epilogues(report)
    host(report)
    report.save()


if __name__ == "__main__":
    main()
