"""Activations, forward and backward, whose kernels also help to quantise their results.

Under delayed scaling the scale is known before, so the kernel itself writes FP8 codes. Under
current scaling the scale depends on the result: the kernel writes the plain result and finds its
scales, and another kernel casts it. The backward also computes the gradient of a bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.library import library_op
from transformer_engine.pytorch.kernels.shapes import rows_of

# Names of the documented `activation` argument. An odd number is a gated kind: act(x1) * h(x2).
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
    "clamped_swiglu": 11,
    "glu": 13,
}
CLAMPED_SWIGLU = ACTIVATION_KINDS["clamped_swiglu"]


class ActivationParameters(NamedTuple):
    """The parameters of `clamped_swiglu`, by default those of gpt-oss; other kinds ignore them."""

    limit: float = 7.0
    alpha: float = 1.702
    glu_linear_offset: float = 1.0


DEFAULT_PARAMETERS = ActivationParameters()

# `act` of the other kinds, plain or gated, by `kind // 2`.
_UNITS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    0: partial(torch.nn.functional.gelu, approximate="tanh"),
    1: lambda x: x * torch.sigmoid(1.702 * x),
    2: torch.nn.functional.relu,
    3: lambda x: torch.nn.functional.relu(x).square(),
    4: torch.nn.functional.silu,
    6: torch.sigmoid,
}

_Maybe = torch.Tensor | None
Result = tuple[_Maybe, _Maybe, _Maybe, _Maybe]
BackwardResult = tuple[_Maybe, _Maybe, _Maybe, _Maybe, _Maybe]


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


def activation_parameters(
    kind: int, params: Mapping[str, Any] | None, op: str
) -> ActivationParameters:
    """The documented `activation_params` of a kind.

    Args:
        kind: see `activation_kind`.
        params: some of them by name; None for the defaults.
        op: who asks, for messages.

    Raises:
        TypeError: no mapping, unknown names, or values that are no numbers.
        ValueError: parameters of a kind that has none; a limit or an alpha that is not above 0;
            numbers that are not finite.

    >>> activation_parameters(CLAMPED_SWIGLU, {"limit": 10}, "doc")
    ActivationParameters(limit=10.0, alpha=1.702, glu_linear_offset=1.0)
    """
    if params is None:
        return DEFAULT_PARAMETERS
    names = ActivationParameters._fields
    if not isinstance(params, Mapping) or not set(params) <= set(names):
        raise TypeError(
            f"[{op}] expected activation_params to be a dict with {', '.join(names)}, got"
            f" {params!r}"
        )
    if params and kind != CLAMPED_SWIGLU:
        name = next(name for name, number in ACTIVATION_KINDS.items() if number == kind)
        raise ValueError(
            f"[{op}] expected activation_params with activation='clamped_swiglu' alone, got"
            f" {params!r} with {name!r}"
        )
    for name, value in params.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"[{op}] expected {name} to be a number, got {value!r}")
    made = ActivationParameters(**{name: float(value) for name, value in params.items()})
    if not (made.limit > 0 and made.alpha > 0 and all(map(math.isfinite, made))):
        raise ValueError(
            f"[{op}] expected finite numbers, limit > 0 and alpha > 0, got {dict(params)!r}"
        )
    return made


def define_activation(kind: int, parameters: ActivationParameters, x: torch.Tensor) -> torch.Tensor:
    """The definition of a kind by torch's operators, computed in the dtype of `x`."""
    if not is_gated(kind):
        return _UNITS[kind // 2](x)
    gate, linear = x.chunk(2, dim=-1)
    if kind != CLAMPED_SWIGLU:
        return _UNITS[kind // 2](gate) * linear
    limit, alpha, offset = parameters
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (linear.clamp(-limit, limit) + offset)


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
    limit: float = 7.0,
    alpha: float = 1.702,
    offset: float = 1.0,
    *,
    launch: bool = True,
) -> Result:
    """`y = act(x)`, or `act(x1) * h(x2)` of the halves of `x` with a gated kind.

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
        limit: see `ActivationParameters`; so are the next two.
        offset: its `glu_linear_offset`.

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
            limit,
            alpha,
            offset,
        )
    return results if plain else (None, *results[1:])


@library_op(writes=("again",))
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
    limit: float = 7.0,
    alpha: float = 1.702,
    offset: float = 1.0,
    again: torch.Tensor | None = None,
    again_scales: torch.Tensor | None = None,
    again_format: int = 5,
    again_rounded: bool = False,
    *,
    launch: bool = True,
) -> BackwardResult:
    """`dx` of `activation_forward`, and the bias gradient of what made `x`.

    Args:
        dy: shape of `y`, dtype of `x`.
        x: what forward read.
        kind: as in forward.
        plain: return `dx` in the dtype of `x`.
        format: as in forward, for `dx`; so are `scale`, `amax`, `rowwise` and `columnwise`.
        dbias: dtype of the column sums of the fp32 `dx`; None for no bias gradient.
        current: current scaling: return the scales for quantising `dx` (needs `plain`).
        power_of_2: as in forward.
        epsilon: as in forward.
        moments: as in forward, for `dx`; so is `active`.
        limit: as in forward; so are `alpha` and `offset`.
        again: memory into which the result of the forward is written once more: `y` in the dtype
            of `x` (it may be `dy` itself); or, with `again_scales`, the transposed codes of `y`,
            uint8 `[n, rows]`.
        again_scales: fp32 `[2]`, {1/scale, scale} of these codes.
        again_format: format of these codes, a value of `DType`.
        again_rounded: `y` is rounded to the dtype of `x` before it is cast, as current scaling
            does.

    Returns:
        `(dx, rowwise, columnwise, scales, dbias)`, None where not asked for.
    """
    cols = x.shape[-1]
    delayed = rowwise or columnwise
    for_moments = launch and moments is not None and not _C.activation_takes_moments(x, dy)
    results = _outputs(x, cols, (plain or for_moments, rowwise, columnwise), delayed or current)
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
            limit,
            alpha,
            offset,
            again,
            again_scales,
            again_format,
            again_rounded,
        )
    return results[0] if plain else None, *results[1:], bias_grad
