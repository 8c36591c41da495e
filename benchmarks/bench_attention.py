"""DotProductAttention beside torch's cuDNN attention called directly on contiguous tensors.

`ratio` is torch's time over ours. Queries, keys and values of ours are views of one projection, as
in a layer, so that what their strides cost is in the figure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from contenders import random
from harness import Report, require_gpu, time_gpu_each
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import transformer_engine.pytorch as te


@dataclass(frozen=True)
class Case:
    batch: int
    heads: int
    groups: int
    sequence: int
    size: int
    causal: bool

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        grouped = "" if self.groups == self.heads else f" kv{self.groups}"
        return f"b{self.batch} h{self.heads}{grouped} s{self.sequence} d{self.size} {kind}"


CASES = [
    Case(4, 32, 32, 4096, 128, True),
    Case(4, 32, 32, 4096, 128, False),
    Case(4, 32, 8, 4096, 128, True),
    Case(8, 32, 32, 2048, 64, True),
    Case(8, 12, 12, 1024, 64, True),
]


def torch_cudnn(case: Case) -> tuple[Callable[[], object], Callable[[], object]]:
    query = random(case.batch, case.heads, case.sequence, case.size).requires_grad_()
    key, value = (
        random(case.batch, case.groups, case.sequence, case.size).requires_grad_() for _ in range(2)
    )
    grouped = {} if case.groups == case.heads else {"enable_gqa": True}

    def forward() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(query, key, value, is_causal=case.causal, **grouped)

    upstream = torch.randn_like(forward())
    inputs = (query, key, value)
    return forward, lambda: torch.autograd.grad(forward(), inputs, upstream)


def ours(case: Case, qkv_format: str) -> tuple[Callable[[], object], Callable[[], object]]:
    lead = (case.sequence, case.batch) if qkv_format == "sbhd" else (case.batch, case.sequence)
    projection = random(*lead, case.heads + 2 * case.groups, case.size).requires_grad_()
    module = te.DotProductAttention(
        case.heads,
        case.size,
        case.groups,
        qkv_format=qkv_format,
        attn_mask_type="causal" if case.causal else "no_mask",
    )

    def forward() -> torch.Tensor:
        return module(*projection.split((case.heads, case.groups, case.groups), dim=2))

    upstream = random(*lead, case.heads * case.size)
    return forward, lambda: torch.autograd.grad(forward(), projection, upstream)


def main() -> None:
    require_gpu()
    report = Report("attention")
    for case in CASES:
        pairs = {"torch cuDNN": torch_cudnn(case)}
        pairs |= {qkv_format: ours(case, qkv_format) for qkv_format in ("sbhd", "bshd")}
        for i, op in enumerate(("forward", "forward + backward")):
            times = time_gpu_each({name: pair[i] for name, pair in pairs.items()}, repeats=20)
            yardstick = times["torch cuDNN"].median_us
            for name, timing in times.items():
                report.row(
                    op=op,
                    case=f"{case} {name}",
                    us=round(timing.median_us, 1),
                    ratio=round(yardstick / timing.median_us, 3),
                    p10_us=round(timing.p10_us, 1),
                    p90_us=round(timing.p90_us, 1),
                )
        torch.cuda.empty_cache()
    report.save()


if __name__ == "__main__":
    main()
