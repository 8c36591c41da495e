"""Cross entropy of rows of logits, in fp32; ranks may have parts of the classes.

`csrc/ops/cross_entropy.h` is the contract. The forward returns four numbers for each row, from
which its loss is computed and which ranks can merge; the backward takes the logarithm of the
merged sum of exponentials.
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
    """The four numbers from which the loss of each row is computed.

    Args:
        logits: `[rows, classes]`, fp32, fp16 or bf16, contiguous.
        labels: `[rows]`, int32: the index of a class of this tensor, `ELSEWHERE` or `IGNORED`.

    Returns:
        `[4, rows]` in fp32. Row 0 has the largest logits. The others are computed from logits minus
        the largest one: the sum of exponentials, the label's logit (NaN for `ELSEWHERE`, 0 for
        `IGNORED`) and the sum of logits.
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
    """Overwrite logits with the gradients of the losses with respect to them; 0 in ignored rows.

    Args:
        logits: as in the forward.
        labels: as in the forward.
        log_sums: `[rows]`, fp32, the logarithm of the sum of all exponentials.
        factors: `[rows]`, fp32, a factor of each row's gradient; None for 1.
        smoothing: share of the target that label smoothing spreads evenly over all classes.
        evenly: `smoothing` divided by the number of classes of all ranks.
    """
    if launch:
        _C.cross_entropy_backward(logits, labels, log_sums, factors, smoothing, evenly, logits)


@library_op(writes=("logits", "codes", "transposed"))
def cross_entropy_backward_codes_(
    logits: torch.Tensor,
    labels: torch.Tensor,
    log_sums: torch.Tensor,
    factors: torch.Tensor | None,
    smoothing: float,
    evenly: float,
    scales: torch.Tensor,
    format: int,
    codes: torch.Tensor | None,
    transposed: torch.Tensor | None,
    first: int,
    plain: bool,
    *,
    launch: bool = True,
) -> None:
    """Write the gradients of `cross_entropy_backward_` as FP8 codes, rounded once.

    Args:
        scales: fp32 `[2]` = {1/scale, scale}.
        format: value of `DType` (5 = E4M3, 6 = E5M2).
        codes: uint8 `[all rows, classes]`, of which the rows from `first` on are written; or None.
        transposed: uint8 `[classes, all rows]`, of which these columns are written; or None.
        first: where the rows of `logits` begin among all rows.
        plain: overwrite the logits with the gradients in their dtype.
    """
    if launch:
        for codes_of in (codes, transposed):
            if codes_of is not None and codes_of.ndim != 2:
                raise ValueError(
                    "[cross_entropy_backward] expected codes with two dimensions, got "
                    f"{tuple(codes_of.shape)}"
                )
        rows = slice(first, first + logits.shape[0])
        rowwise = None if codes is None else codes[rows]
        columnwise = None if transposed is None else transposed[:, rows]
        into = logits if plain else None
        what = (logits, labels, log_sums, factors, smoothing, evenly, into)
        _C.cross_entropy_backward(*what, rowwise, columnwise, scales, format)
