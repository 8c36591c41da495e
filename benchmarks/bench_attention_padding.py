"""DotProductAttention if half of the tokens are padding, in format thd and given by lengths.

`ratio` is our time for full sequences divided by our time with padding.
"""

from __future__ import annotations

from attention_cases import Case
from bench_attention import measure_less
from harness import Report, require_gpu

CASES = [
    Case(8, 32, 32, 4096, 128, "padding_causal", padded="thd"),
    Case(8, 32, 32, 4096, 128, "padding_causal", padded="lengths"),
    Case(8, 32, 32, 4096, 128, "padding", padded="thd"),
]
BAR = 1.6


def main() -> None:
    require_gpu()
    report = Report("attention_padding")
    for case in CASES:
        measure_less(report, "half padding", case, BAR)
    report.save()


if __name__ == "__main__":
    main()
