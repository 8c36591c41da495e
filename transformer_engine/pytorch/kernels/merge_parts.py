"""Merges results that were computed in parts: sums, or attention with different keys."""

from __future__ import annotations

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.library import library_op

MOST_PARTS = 4  # in a call, as in `csrc/ops/merge_parts.h`


@library_op(writes=("out", "log_sum_exp"))
def merge_parts(
    out: torch.Tensor,
    log_sum_exp: torch.Tensor | None,
    parts: list[torch.Tensor],
    part_log_sum_exps: list[torch.Tensor],
    begins: list[int],
    token_axis: int = 1,
    fresh: bool = False,
    *,
    launch: bool = True,
) -> None:
    """Add parts to `out`, in fp32 and rounded once.

    Without log-sum-exps `out` becomes its sum with all parts. With them, `out` and each part hold
    attention of the same queries with disjoint sets of keys, and `out` becomes attention with all
    these keys: each summand is multiplied by its share of the softmax,
    `exp(log_sum_exp of the summand - log_sum_exp of all)`.

    An infinite log-sum-exp means that a row has no key. Such rows are not read; if neither `out`
    nor a part has keys for a row, the row of `out` stays as it is.

    Args:
        out: `[a, b, heads, size]` or `[tokens, heads, size]`; the dtype of the parts or fp32. Any
            strides whose last is 1, here and in parts.
        log_sum_exp: fp32, the shape of `out` without its last axis, any strides; None for a sum.
        parts: one to four tensors of one dtype, fp32, fp16 or bf16; the shape of `out`, except for
            the number of tokens.
        part_log_sum_exps: fp32, one for each part, any strides; an empty list for a sum.
        begins: for each part, the token of `out` at which the part begins.
        token_axis: the axis of tokens in `[a, b, heads, size]`, 0 or 1.
        fresh: `out` and `log_sum_exp` are uninitialised. Rows that no part covers become zero.
    """
    if not launch:
        return
    if out.dim() == 3:
        out, parts = out.unsqueeze(0), [x.unsqueeze(0) for x in parts]
        part_log_sum_exps = [x.unsqueeze(0) for x in part_log_sum_exps]
        log_sum_exp = None if log_sum_exp is None else log_sum_exp.unsqueeze(0)
    _C.merge_parts(out, log_sum_exp, parts, part_log_sum_exps, begins, token_axis, fresh)
