"""Fused attention in FP8 on CUDA: graphs of cuDNN. `csrc/ops/attention.h` is the contract.

`settings` are those of `kernels/attention.py`. The forward and the backward each write `pairs`,
fp32 `[rows, 2]`: a row {1/scale, scale} for each of their scales, then the amaxes that cuDNN found.

There is no CPU kernel: `attention/backends/unfused_fp8.py` is the definition.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transformer_engine import _C
from transformer_engine.pytorch.kernels.attention import empty_statistics, gradients_of
from transformer_engine.pytorch.kernels.library import library_op
from transformer_engine.pytorch.kernels.memory import new_empty

FORWARD_SCALES = 3
_FORWARD_ROWS, _BACKWARD_ROWS = 4, 8  # of `pairs`


@library_op()
def fp8_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scales: Sequence[torch.Tensor | None],
    settings: tuple[int, ...],
    scale: float,
    statistics: bool,
    amaxes: Sequence[torch.Tensor | None],
    *,
    launch: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """`softmax(scale * query key^T) value` over the keys that a query sees.

    Args:
        query: codes `[sequence, batch, heads, size]` or `[batch, sequence, heads, size]`, E4M3, of
            any strides, of which the last is 1.
        key: likewise, with `groups` heads.
        value: likewise, with `groups` heads; its size may differ.
        scales: fp32 `[1]` each, of inputs, softmax result and result. None for the second one
            stands for 448, with which no softmax result saturates.
        settings: see `kernels/attention.py`.
        scale: factor on the scores.
        statistics: whether a backward will follow.
        amaxes: fp32 `[1]` each, raised to those of softmax result and result; None for an amax
            that is not needed.

    Returns:
        Codes of the result, `[..., heads * size of value]`, E4M3; fp32 statistics of the softmax,
        `[batch, heads, queries]`, None without `statistics`; and `pairs`.
    """
    *lead, heads, _ = query.shape
    out = new_empty(query, (*lead, heads * value.shape[-1]))
    statistics_out = empty_statistics(query, settings[0]) if statistics else None
    pairs = new_empty(query, (_FORWARD_ROWS, 2), torch.float32)
    if launch:
        _C.fp8_attention_forward(
            (query, key, value), settings, scale, (out, statistics_out), pairs, scales, amaxes
        )
    return out, statistics_out, pairs


@library_op()
def fp8_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    statistics: torch.Tensor,
    pairs: torch.Tensor,
    scales: Sequence[torch.Tensor],
    settings: tuple[int, ...],
    scale: float,
    format: int,
    amaxes: Sequence[torch.Tensor | None],
    together: int,
    *,
    launch: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value; arguments not listed are the forward's.

    Args:
        grad: codes of the gradient of the result, contiguous.
        out: what the forward returned.
        statistics: what the forward returned.
        pairs: what the forward returned.
        scales: fp32 `[1]` each, of the gradients of the result, of the product of query and key,
            and of the inputs.
        settings: the forward's; `deterministic` only matters here.
        format: format of all gradients, a value of `DType`.
        amaxes: fp32 `[1]` each, raised to those of the gradients of the product, of query, of key
            and of value; None for an amax that is not needed.
        together: where the gradients are stored, `APART` or `AS_INPUTS`.

    Returns:
        The codes of the three gradients, and their fp32 `[2]` = {1/scale, scale}.
    """
    _, gradients = gradients_of((query, key, value), together, launch)
    all_pairs = new_empty(query, (_BACKWARD_ROWS, 2), torch.float32)
    if launch:
        forward_scales = [pairs[i, 1:] for i in range(FORWARD_SCALES)]
        _C.fp8_attention_backward(
            (query, key, value),
            settings,
            scale,
            (out, statistics),
            all_pairs,
            [*forward_scales, *scales],
            amaxes,
            (grad, *gradients),
            format,
        )
    grad_query, grad_key, grad_value = gradients
    return grad_query, grad_key, grad_value, all_pairs[2 * FORWARD_SCALES - 1]


def fp8_attention_refusal(
    sizes: tuple[tuple[int, ...], ...],
    device: int,
    settings: tuple[int, ...],
    statistics: bool,
    format: int | None,
) -> str:
    """Why cuDNN refuses codes of these sizes, `""` if it takes them.

    Args:
        sizes: sizes of query, key and value.
        device: index of the GPU.
        settings: see `kernels/attention.py`.
        statistics: whether a backward will follow.
        format: format of the gradients, if the backward runs in FP8; else None.
    """
    return _C.fp8_attention_refusal(sizes, device, settings, statistics, format)
