"""Divides the time of a training step among kinds of kernels, by the names of kernels."""

from __future__ import annotations

import re
from collections import Counter

from profiling import Profile

# The first pattern that matches counts.
KINDS = {
    "fused by torch.compile": r"^triton_",
    "attention": r"cudnn_generated|cudnn::fusion|flash|fmha",
    "FP8 products": r"nvjet_sm\d+_[qr]{2}|e4m3|e5m2",
    "products": r"nvjet|gemm|cutlass|splitK",
    "AdamW": r"adam_kernel|FusedOptimizer|FusedAdam",
    "norm of gradients": r"LpNorm|sum_squares",
    "norms": r"NormKind|layer_norm|rms_norm",
    "activations": r"Unit|gelu|silu",
    "casts": r"tile_map|transpose_kernel|update_kernel",
    "sums of columns": r"column_parts",
    "rotation": r"rope_kernel",
    "residuals": r"line_kernel",
    "cross entropy": r"cross_entropy|softmax|nll_loss",
    "embedding": r"embedding|index|compute_grad_weight|sum_and_scatter|[sS]ort",
    "copies": r"Memcpy|Memset|copy|Fill",
}
SHOWN = 3


def kind_of(kernel: str) -> str:
    """The kind of a kernel."""
    for kind, pattern in KINDS.items():
        if re.search(pattern, kernel):
            return kind
    return "other"


def costs(profile: Profile) -> dict[str, float]:
    """The share of each kind in the time of all kernels, the largest first."""
    times: Counter[str] = Counter()
    for kernel, microseconds in profile.times.items():
        times[kind_of(kernel)] += microseconds
    whole = sum(times.values())
    return {kind: time / whole for kind, time in times.most_common()}


def largest_costs(profile: Profile) -> str:
    """The three largest shares as a text."""
    shares = list(costs(profile).items())[:SHOWN]
    return ", ".join(f"{kind} {share:.0%}" for kind, share in shares)
