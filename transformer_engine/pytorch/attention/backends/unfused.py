"""Attention as it is defined: two batched products with a masked softmax of the scores between.

It takes every problem on every device, and keeps the scores in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from transformer_engine.pytorch.attention.masks import Mask
from transformer_engine.pytorch.kernels.softmax import softmax_backward, softmax_forward


class _MaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: torch.Tensor, hidden: torch.Tensor | None, *band: int
    ) -> torch.Tensor:
        probabilities = softmax_forward(scores, hidden, 1.0, *band)
        ctx.save_for_backward(probabilities)
        return probabilities

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (probabilities,) = ctx.saved_tensors
        return softmax_backward(grad.contiguous(), probabilities, 1.0), None, None, None, None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask,
    scale: float,
    dropout: float,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(scale * query @ key^T + bias) @ value, over the keys that the mask lets through.

    The product carries the scale, so that fp16 scores overflow no sooner than they must. The query
    heads of a group are rows of one product with the group's key: nothing is repeated.
    """
    batch, heads, queries, size = query.shape
    groups, keys = key.shape[1], key.shape[2]
    rows = heads // groups * queries
    scores = torch.baddbmm(
        query.new_empty(1, 1, 1),  # beta = 0: never read
        query.reshape(batch * groups, rows, size),
        key.reshape(batch * groups, keys, size).transpose(1, 2),
        beta=0,
        alpha=scale,
    ).view(batch, heads, queries, keys)
    if bias is not None:
        scores = scores + bias.float()
    probabilities = _MaskedSoftmax.apply(
        scores, mask.hidden, mask.left, mask.right, mask.diagonal
    ).to(query.dtype)
    if dropout > 0.0:
        probabilities = torch.nn.functional.dropout(probabilities, dropout)
    out = torch.bmm(
        probabilities.view(batch * groups, rows, keys),
        value.reshape(batch * groups, keys, value.shape[-1]),
    )
    return out.view(batch, heads, queries, value.shape[-1])
