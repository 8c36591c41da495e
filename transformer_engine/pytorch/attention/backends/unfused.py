"""Attention as it is defined: two batched products with a masked softmax of the scores between.

It takes every problem on every device, and keeps the scores in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from transformer_engine.pytorch.attention.backend import Backend, Requirement
from transformer_engine.pytorch.attention.dense import dense
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


def _softmax_with_sink(scores: torch.Tensor, mask: Mask, sink: torch.Tensor) -> torch.Tensor:
    """Weights of the keys, where every query sees the sink as one more key.

    A query that sees no key gives all to the sink: its weights are zero, and so is its gradient.
    """
    batch, heads, queries, keys = scores.shape
    hidden = mask.dense(queries, keys, scores.device)
    if hidden is not None:
        hidden = pad(hidden.expand(*hidden.shape[:-1], keys), (0, 1))
    column = sink.float().view(1, heads, 1, 1).expand(batch, heads, queries, 1)
    with_sink = torch.cat((scores, column.to(scores.dtype)), dim=-1)
    weights: torch.Tensor = _MaskedSoftmax.apply(with_sink, hidden, -1, -1, 0)
    return weights[..., :keys]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask,
    scale: float,
    dropout: float,
    bias: torch.Tensor | None,
    sink: torch.Tensor | None,
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
    if sink is None:
        probabilities = _MaskedSoftmax.apply(
            scores, mask.hidden, mask.left, mask.right, mask.diagonal
        ).to(query.dtype)
    else:
        probabilities = _softmax_with_sink(scores, mask, sink).to(query.dtype)
    if dropout > 0.0:
        probabilities = torch.nn.functional.dropout(probabilities, dropout)
    out = torch.bmm(
        probabilities.reshape(batch * groups, rows, keys),
        value.reshape(batch * groups, keys, value.shape[-1]),
    )
    return out.view(batch, heads, queries, value.shape[-1])


BACKEND = Backend(
    "unfused",
    dense(_attend),
    keeps_scores=True,
    requirements=(
        Requirement(
            lambda problem, allowed: allowed.unfused,
            "switched off by NVTE_UNFUSED_ATTN=0; it takes every problem, set it to 1",
        ),
    ),
)
