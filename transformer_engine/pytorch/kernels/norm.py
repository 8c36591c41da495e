"""LayerNorm and RMSNorm over the last axis, forward (plain or FP8 results) and backward.

Under delayed scaling the scale is known before, so the kernel itself writes FP8 codes. Under
current scaling the scale depends on the result: the kernel writes the plain result and finds its
scales, and another kernel casts it.
"""

from __future__ import annotations

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.library import library_op
from transformer_engine.pytorch.kernels.shapes import rows_of

LAYER_NORM = 0
RMS_NORM = 1


def _fp8_outputs(
    x: torch.Tensor, rowwise: bool, columnwise: bool, current: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Fresh (codes, transposed codes, scales) of a value like `x`, where asked for."""
    scaled = rowwise or columnwise or current
    return (
        torch.empty_like(x, dtype=torch.uint8) if rowwise else None,
        x.new_empty((x.shape[-1], rows_of(x)), dtype=torch.uint8) if columnwise else None,
        x.new_empty(2, dtype=torch.float32) if scaled else None,
    )


@library_op()
def norm_forward(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    kind: int,
    epsilon: float,
    zero_centered: bool,
    out_dtype: torch.dtype | None,
    format: int = 5,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    rowwise: bool = False,
    columnwise: bool = False,
    current: bool = False,
    power_of_2: bool = False,
    amax_epsilon: float = 0.0,
    moments: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    *,
    launch: bool = True,
) -> tuple[
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor,
]:
    """`y = (x - mean) * rstd * g + beta`; RMSNorm has no mean and no beta.

    Args:
        x: `[..., cols]`, fp32, fp16 or bf16, contiguous.
        gamma: `[cols]`, fp32, fp16 or bf16.
        beta: `[cols]`, dtype of gamma; None for RMSNorm.
        kind: `LAYER_NORM` or `RMS_NORM`.
        epsilon: added to the variance (RMSNorm: to the mean square).
        zero_centered: `g = 1 + gamma` instead of `gamma`.
        out_dtype: dtype of the plain result; None for no plain result.
        format: value of `DType` (5 = E4M3, 6 = E5M2), for either scaling.
        scale: fp32 `[1]`, delayed scaling.
        amax: fp32 `[1]`. Delayed scaling raises it to `max |y|`; current scaling writes it.
        rowwise: delayed scaling: return the codes of `y`, rounded once from fp32.
        columnwise: delayed scaling: return the transposed codes `[cols, rows]`.
        current: current scaling: return the scales for quantising the plain result.
        amax_epsilon: current scaling: lower bound of the amax.
        power_of_2: current scaling: round the scale down to a power of two.
        moments: row that the moments of `y` are merged into, as rounded to `out_dtype` (None: to
            the dtype of `x`); see `kernels.moments.moments`.
        active: flag on the device for `moments`.

    Returns:
        `(y, rowwise, columnwise, scales, mean, rstd)`, None where not asked for (`mean`: where
        there is none). `scales` is {1/scale, scale}; `mean` and `rstd` are fp32 `[rows]`.
    """
    alone = moments is not None and out_dtype is None and not columnwise
    plain = out_dtype
    if launch and plain is None and moments is not None and not alone:
        plain = None if _C.norm_takes_moments(x, gamma, beta) else x.dtype
    y = None if plain is None else torch.empty_like(x, dtype=plain)
    codes, transposed, scales = _fp8_outputs(x, rowwise, columnwise, current)
    rows = rows_of(x)
    mean = x.new_empty(rows, dtype=torch.float32) if kind == LAYER_NORM else None
    rstd = x.new_empty(rows, dtype=torch.float32)
    if launch:
        same = (x, gamma, beta, kind, epsilon, zero_centered)
        outputs = (y, codes, transposed, scales, mean, rstd)
        scaling = (format, scale, amax, current, amax_epsilon, power_of_2)
        _C.norm_forward(*same, *outputs, *scaling, None if alone else moments, active)
        # The kernel that writes only row-wise FP8 merges no moments, so a second call does. One
        # call of another kernel would not do: its order of sums might change the codes.
        if alone:
            norm_forward(*same, x.dtype, moments=moments, active=active)
    return None if out_dtype is None else y, codes, transposed, scales, mean, rstd


@library_op()
def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    kind: int,
    zero_centered: bool,
    residual_grad: torch.Tensor | None = None,
    *,
    launch: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of `norm_forward`; arguments not listed are what it read or returned.

    Args:
        dy: shape of `x`, fp32, fp16 or bf16, contiguous.
        residual_grad: added to `dx` before it is rounded; shape and dtype of `x`.

    Returns:
        `(dx, dgamma, dbeta)`: `dx` in the dtype of `x`, the others in that of `gamma`; `dbeta` is
        None for RMSNorm.
    """
    dx = torch.empty_like(x)
    dgamma = torch.empty_like(gamma)
    dbeta = torch.empty_like(gamma) if kind == LAYER_NORM else None
    if launch:
        _C.norm_backward(
            dy, x, gamma, mean, rstd, kind, zero_centered, residual_grad, dx, dgamma, dbeta
        )
    return dx, dgamma, dbeta
