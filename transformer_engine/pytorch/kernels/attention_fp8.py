"""Fused attention in FP8 on CUDA: graphs of cuDNN. `csrc/ops/attention.h` is the contract.

`settings` as in `kernels/attention.py`. `scales` is fp32 `[3, 2]` = {1/scale, scale} of inputs,
softmax result and result, all E4M3; for the backward `[6, 2]`, followed by those of the gradients
of the result, of the product of query and key, and of the inputs.

There is no CPU kernel: `attention/backends/unfused_fp8.py` is the definition.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.attention import empty_statistics, gradients_of
from transformer_engine.pytorch.kernels.library import library_op


@library_op()
def fp8_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scales: torch.Tensor,
    settings: tuple[int, ...],
    scale: float,
    statistics: bool,
    amaxes: Sequence[torch.Tensor | None],
    *,
    launch: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`softmax(scale * query key^T) value` over the keys that a query sees.

    Args:
        query: codes `[sequence, batch, heads, size]` or `[batch, sequence, heads, size]`, of any
            strides but the last one, 1.
        key: likewise, with `groups` heads.
        value: likewise, with `groups` heads and a size of its own.
        scales: see above.
        settings: see above.
        scale: factor on the scores.
        statistics: whether a backward will follow.
        amaxes: fp32 `[1]` each, raised to those of softmax result and result; None where nobody
            asks.
        launch: False gives the shapes alone.

    Returns:
        Codes of the result, `[..., heads, size of value]`, and fp32 statistics of the softmax,
        `[batch, heads, queries]`; None where not asked for.
    """
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    statistics_out = empty_statistics(query, settings[0]) if statistics else None
    if launch:
        found = scales.new_zeros(2)
        _C.fp8_attention_forward(
            (query, key, value),
            settings,
            scale,
            (out, statistics_out),
            (scales, found),
        )
        _raise(amaxes, found)
    return out, statistics_out


@library_op()
def fp8_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    statistics: torch.Tensor,
    scales: torch.Tensor,
    settings: tuple[int, ...],
    scale: float,
    format: int,
    amaxes: Sequence[torch.Tensor | None],
    needs: Sequence[bool],
    together: int,
    *,
    launch: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of the gradients of query, key and value; arguments not listed are the forward's.

    Args:
        grad: codes of the gradient of the result, contiguous.
        query: the forward's.
        key: the forward's.
        value: the forward's.
        out: what the forward returned.
        statistics: what the forward returned.
        scales: see above.
        settings: the forward's; `deterministic` is read here alone.
        format: of all gradients, value of `DType`.
        amaxes: fp32 `[1]` each, raised to those of the gradient of the product and of the inputs.
        needs: of query, key and value: whether the amax of its gradient counts.
        together: where the gradients lie, `APART` or `AS_INPUTS`.
        launch: False gives the shapes alone.
    """
    _, gradients = gradients_of((query, key, value), together, launch)
    if launch:
        found = scales.new_zeros(4)
        _C.fp8_attention_backward(
            (query, key, value),
            settings,
            scale,
            (out, statistics),
            (scales, found),
            (grad, *gradients),
            format,
        )
        of_product, *of_inputs = found.split(1)
        counted = [amax for amax, needed in zip(of_inputs, needs, strict=True) if needed]
        _raise((amaxes[0], *[amaxes[1]] * len(counted)), torch.cat([of_product, *counted]))
    grad_query, grad_key, grad_value = gradients
    return grad_query, grad_key, grad_value


def _raise(amaxes: Sequence[torch.Tensor | None], found: torch.Tensor) -> None:
    for amax, new in zip(amaxes, found.split(1), strict=True):
        if amax is not None:
            torch.fmax(amax, new, out=amax)  # a NaN does not count


def fp8_attention_refusal(
    sizes: tuple[tuple[int, ...], ...],
    device: int,
    settings: tuple[int, ...],
    statistics: bool,
    format: int | None,
) -> str:
    """Why cuDNN refuses codes of these sizes, `""` where it takes them.

    Args:
        sizes: of query, key and value.
        device: index of the GPU.
        settings: see above.
        statistics: whether a backward will follow.
        format: of the gradients of a backward in FP8; None for another, or none.
    """
    return _C.fp8_attention_refusal(sizes, device, settings, statistics, format)
