"""Merging attention of the same queries with two sets of keys, in place."""

from __future__ import annotations

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.library import library_op


@library_op(writes=("out", "log_sum_exp"))
def merge_attention(
    out: torch.Tensor,
    log_sum_exp: torch.Tensor,
    part: torch.Tensor,
    part_log_sum_exp: torch.Tensor,
    *,
    launch: bool = True,
) -> None:
    """Make `out` and `log_sum_exp` those of attention with the keys of both, none of them twice.

    `out` is `lerp(out, part, share)` with `share = sigmoid(part_log_sum_exp - log_sum_exp)`, in
    fp32 and rounded once. Rows of a part that has no key for them, of log-sum-exp -Inf, are not
    looked at, nor is `out` where its log-sum-exp is -Inf and the part's is finite.

    Args:
        out: `[a, b, heads, size]` or `[tokens, heads, size]`; the dtype of `part` or fp32. Any
            strides whose last is 1, here and in `part`.
        log_sum_exp: fp32, the shape of `out` without its last axis, any strides.
        part: the result to add; the shape of `out`, fp32, fp16 or bf16.
        part_log_sum_exp: fp32, the shape of `log_sum_exp`, any strides.
        launch: False does nothing.
    """
    if not launch:
        return
    if out.dim() == 3:
        out, log_sum_exp, part, part_log_sum_exp = (
            x.unsqueeze(0) for x in (out, log_sum_exp, part, part_log_sum_exp)
        )
    _C.merge_attention(out, log_sum_exp, part, part_log_sum_exp)
