"""Activations, forward and backward: plain results, FP8 codes, bias gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.library import library_op
from transformer_engine.pytorch.kernels.shapes import rows_of

# Names of the documented `activation` argument. An odd number is a gated kind: act(x1) * x2.
ACTIVATION_KINDS = {
    "gelu": 0,
    "geglu": 1,
    "qgelu": 2,
    "qgeglu": 3,
    "relu": 4,
    "reglu": 5,
    "srelu": 6,
    "squared_relu": 6,
    "sreglu": 7,
    "silu": 8,
    "swiglu": 9,
}

# What they compute, by half of their number.
DEFINITIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    partial(torch.nn.functional.gelu, approximate="tanh"),
    lambda x: x * torch.sigmoid(1.702 * x),
    torch.nn.functional.relu,
    lambda x: torch.nn.functional.relu(x).square(),
    torch.nn.functional.silu,
)

Result = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def activation_kind(name: str) -> int:
    """The number of an activation; its parity says whether it is gated."""
    kind = ACTIVATION_KINDS.get(name)
    if kind is None:
        raise NotImplementedError(
            f"Activation type {name} is not supported! [activation] expected one of"
            f" {', '.join(ACTIVATION_KINDS)}, got {name!r}"
        )
    return kind


def is_gated(kind: int) -> bool:
    """Whether the kind reads `[..., 2n]` and gives `[..., n]`."""
    return kind % 2 == 1


def _outputs(
    like: torch.Tensor, cols: int, wanted: tuple[bool, bool, bool], scales: bool
) -> Result:
    """Fresh (plain, rowwise, columnwise, scales) of a value `[..., cols]`."""
    plain, rowwise, columnwise = wanted
    shape = (*like.shape[:-1], cols)
    rows = rows_of(like)
    return (
        like.new_empty(shape) if plain else None,
        like.new_empty(shape, dtype=torch.uint8) if rowwise else None,
        like.new_empty((cols, rows), dtype=torch.uint8) if columnwise else None,
        like.new_empty(2, dtype=torch.float32) if scales else None,
    )


@library_op()
def activation_forward(
    x: torch.Tensor,
    kind: int,
    plain: bool = True,
    format: int = 5,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    rowwise: bool = False,
    columnwise: bool = False,
    current: bool = False,
    power_of_2: bool = False,
    epsilon: float = 0.0,
    moments: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    *,
    launch: bool = True,
) -> Result:
    """`y = act(x)`, or `act(x1) * x2` of the halves of `x` with a gated kind.

    Args:
        x: `[..., n]` or `[..., 2n]`, fp32, fp16 or bf16, contiguous.
        kind: see `activation_kind`.
        plain: return `y` in the dtype of `x`.
        format: value of `DType` (5 = E4M3, 6 = E5M2), for either scaling.
        scale: fp32 `[1]`, delayed scaling.
        amax: fp32 `[1]`. Delayed scaling raises it to `max |y|`; current scaling writes it.
        rowwise: delayed scaling: return the codes of `y`, rounded once from fp32.
        columnwise: delayed scaling: return the transposed codes `[n, rows]`.
        current: current scaling: return the scales for quantising `y` (needs `plain`).
        power_of_2: current scaling: round the scale down to a power of two.
        epsilon: current scaling: lower bound of the amax.
        moments: row that the moments of `y`, in the dtype of `x`, are merged into; see
            `kernels.moments.moments`.
        active: flag on the device for `moments`.

    Returns:
        `(y, rowwise, columnwise, scales)`, None where not asked for; `scales` is {1/scale, scale}.
    """
    width = x.shape[-1]
    cols = width // 2 if is_gated(kind) else width
    delayed = rowwise or columnwise
    with_plain = plain or (launch and moments is not None and not _C.activation_takes_moments(x))
    results = _outputs(x, cols, (with_plain, rowwise, columnwise), delayed or current)
    if launch:
        y, codes, transposed, scales = results
        _C.activation_forward(
            x,
            kind,
            y,
            format,
            codes,
            transposed,
            scales if delayed else None,
            scale,
            amax,
            scales if current else None,
            power_of_2,
            epsilon,
            moments,
            active,
        )
    return results if plain else (None, *results[1:])


@library_op()
def activation_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    kind: int,
    plain: bool = True,
    format: int = 5,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    rowwise: bool = False,
    columnwise: bool = False,
    current: bool = False,
    power_of_2: bool = False,
    epsilon: float = 0.0,
    dbias: torch.dtype | None = None,
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
]:
    """`dx` of `activation_forward`, and the bias gradient of what made `x`.

    Args:
        dy: shape of `y`, dtype of `x`.
        x: what forward read.
        kind: as in forward.
        plain: return `dx` in the dtype of `x`.
        format: as in forward, for `dx`; so are `scale`, `amax`, `rowwise` and `columnwise`.
        scale: see `format`.
        amax: see `format`.
        rowwise: see `format`.
        columnwise: see `format`.
        dbias: dtype of the column sums of the fp32 `dx`; None for no bias gradient.
        current: current scaling: return the scales for quantising `dx` (needs `plain`).
        power_of_2: as in forward.
        epsilon: as in forward.
        moments: as in forward, for `dx`; so is `active`.
        active: see `moments`.

    Returns:
        `(dx, rowwise, columnwise, scales, dbias)`, None where not asked for.
    """
    cols = x.shape[-1]
    delayed = rowwise or columnwise
    with_plain = plain or (
        launch and moments is not None and not _C.activation_takes_moments(x, dy)
    )
    results = _outputs(x, cols, (with_plain, rowwise, columnwise), delayed or current)
    bias_grad = x.new_empty(cols, dtype=dbias) if dbias is not None else None
    if launch:
        dx, codes, transposed, scales = results
        _C.activation_backward(
            dy,
            x,
            kind,
            dx,
            format,
            codes,
            transposed,
            scales if delayed else None,
            scale,
            amax,
            scales if current else None,
            power_of_2,
            epsilon,
            bias_grad,
            moments,
            active,
        )
    return results[0] if plain else None, *results[1:], bias_grad
