"""DotProductAttention: each of our backends, compared with direct calls of libraries.

`ratio` is the time of the fastest library divided by ours. Libraries get contiguous tensors; ours
gets the parts of one tensor, as in a layer. For windows, `ratio` is our time without a window
divided by our time with it. Rows named `chosen` are the backend that runs by default. Padding and
generation are measured by bench_attention_padding.py and bench_generation.py.
"""

from __future__ import annotations

import torch
from attention_cases import Call, Case, libraries, only, ours, takers
from contenders import random
from harness import Report, Timing, require_gpu, time_gpu_each, time_host_each
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import transformer_engine.pytorch as te

OPS = ("forward", "forward + backward")
DENSE = [
    Case(4, 32, 32, 4096, 128, "causal"),
    Case(4, 32, 32, 4096, 128, "no_mask"),
    Case(4, 32, 8, 4096, 128, "causal"),
    Case(2, 32, 32, 8192, 128, "causal"),
    Case(2, 32, 32, 8192, 128, "no_mask"),
    Case(8, 32, 32, 2048, 64, "causal"),
    Case(8, 32, 32, 2048, 64, "no_mask"),
    Case(8, 12, 12, 1024, 64, "causal"),
]
WINDOWED = [Case(1, 32, 32, 16384, 128, "causal", window=(1024, 0))]
BAR = 0.98
BAR_OF_WINDOW = 4.0


def row(
    report: Report, op: str, case: str, yardstick: float, timing: Timing, **more: float
) -> None:
    """Add a measurement to the report, with the ratio of `yardstick` to it."""
    report.row(
        op=op,
        case=case,
        us=round(timing.median_us, 1),
        ratio=round(yardstick / timing.median_us, 3),
        p10_us=round(timing.p10_us, 1),
        p90_us=round(timing.p90_us, 1),
        **more,
    )


def measure_dense(report: Report, case: Case) -> None:
    """Measure the libraries, each of our backends, and the chosen backend in both formats."""
    peers = libraries(case)
    pairs: dict[str, tuple[Call, Call]] = dict(peers)
    for name in takers(case):
        if name != "unfused":  # its matrix of scores would not fit into memory
            pairs[f"ours, {name}"] = ours(case, backend=name)
    pairs["chosen, bshd"] = ours(case)
    pairs["chosen, sbhd"] = ours(case, "sbhd")
    for i, op in enumerate(OPS):
        times = time_gpu_each({name: pair[i] for name, pair in pairs.items()}, repeats=15, warmup=6)
        best = min(times[name].median_us for name in peers)
        for name, timing in times.items():
            bar = {"bar": BAR} if name.startswith("chosen") else {}
            row(report, op, f"{case} {name}", best, timing, **bar)


def measure_less(report: Report, what: str, case: Case, bar: float) -> None:
    """Measure how much faster a case with padding or a window is than `case.whole()`."""
    pairs = {"whole": ours(case.whole())}
    for name in takers(case):
        if name != "unfused":
            pairs[f"ours, {name}"] = ours(case, backend=name)
    pairs["chosen"] = ours(case)
    for i, op in enumerate(OPS):
        times = time_gpu_each({name: pair[i] for name, pair in pairs.items()}, repeats=10, warmup=5)
        whole = times.pop("whole").median_us
        for name, timing in times.items():
            more = {"bar": bar} if name == "chosen" else {}
            row(report, f"{what}, {op}", f"{case} {name}", whole, timing, **more)


def measure_host(report: Report) -> None:
    """Measure the host time of a tiny forward, relative to that of torch's own call."""
    query, key, value = (random(64, 1, 2, 64) for _ in range(3))
    first = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
    module = te.DotProductAttention(2, 64)

    def backend(name: str) -> Call:
        def call() -> torch.Tensor:
            return module(query, key, value)

        return call

    def plain() -> torch.Tensor:
        return scaled_dot_product_attention(*first, is_causal=True)

    with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        yardstick = time_host_each({"torch": plain})["torch"].median_us
    with torch.no_grad():
        for name in takers(Case(1, 2, 2, 64, 64, "causal")):
            with only(name):
                timing = time_host_each({name: backend(name)})[name]
            row(report, "host time of a forward", f"ours, {name}", yardstick, timing)


def main() -> None:
    require_gpu()
    report = Report("attention")
    for case in DENSE:
        measure_dense(report, case)
        torch.cuda.empty_cache()
    for case in WINDOWED:
        measure_less(report, "window", case, BAR_OF_WINDOW)
    measure_host(report)
    report.save()


if __name__ == "__main__":
    main()
