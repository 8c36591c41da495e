"""Cross entropy of rows of logits, in fp32; ranks may have parts of the classes.

`csrc/ops/cross_entropy.h` is the contract: the forward gives what a row's loss is made of, which
ranks merge; the backward takes the logarithm of the merged sum.
"""

from __future__ import annotations

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.library import library_op

ELSEWHERE, IGNORED = -1, -2  # labels that are no class of this tensor


@library_op()
def cross_entropy_forward(
    logits: torch.Tensor, labels: torch.Tensor, *, launch: bool = True
) -> torch.Tensor:
    """What the losses of rows are made of.

    Args:
        logits: `[rows, classes]`, fp32, fp16 or bf16, contiguous.
        labels: `[rows]`, int32: a class of these, `ELSEWHERE` or `IGNORED`.

    Returns:
        `[4, rows]` in fp32: the largest logit, and less that, the sum of exponentials, the label's
        logit (NaN elsewhere, 0 where ignored) and the sum of logits.
    """
    sums = logits.new_empty((4, logits.shape[0]), dtype=torch.float32)
    if launch:
        _C.cross_entropy_forward(logits, labels, sums)
    return sums


@library_op(writes=("logits",))
def cross_entropy_backward_(
    logits: torch.Tensor,
    labels: torch.Tensor,
    log_sums: torch.Tensor,
    factors: torch.Tensor | None,
    smoothing: float,
    evenly: float,
    *,
    launch: bool = True,
) -> None:
    """Gradients of losses by logits, in the memory of these; 0 in rows that are ignored.

    Args:
        logits: as in the forward.
        labels: as in the forward.
        log_sums: `[rows]`, fp32, the logarithm of the sum of all exponentials.
        factors: `[rows]`, fp32, of each row's gradient.
        smoothing: share of the target that is spread evenly.
        evenly: that share of one class.
    """
    if launch:
        _C.cross_entropy_backward(logits, labels, log_sums, factors, smoothing, evenly, logits)


@library_op(writes=("logits",))
def cross_entropy_backward_codes(
    logits: torch.Tensor,
    labels: torch.Tensor,
    log_sums: torch.Tensor,
    factors: torch.Tensor | None,
    smoothing: float,
    evenly: float,
    scales: torch.Tensor,
    format: int,
    rowwise: bool,
    columnwise: bool,
    plain: bool,
    *,
    launch: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of `cross_entropy_backward_` as FP8 codes, rounded once.

    Args:
        scales: fp32 `[2]` = {1/scale, scale}.
        format: value of `DType` (5 = E4M3, 6 = E5M2).
        rowwise: return codes `[rows, classes]`.
        columnwise: return the transposed codes `[classes, rows]`.
        plain: overwrite the logits with the gradients in their dtype.

    Returns:
        `(rowwise, columnwise)`, None where not asked for; both are where only `plain` is.
    """
    codes = torch.empty_like(logits, dtype=torch.uint8) if rowwise else None
    transposed = logits.new_empty(logits.shape[::-1], dtype=torch.uint8) if columnwise else None
    if launch:
        into = logits if plain else None
        what = (logits, labels, log_sums, factors, smoothing, evenly, into)
        _C.cross_entropy_backward(*what, codes, transposed, scales, format)
    return codes, transposed
