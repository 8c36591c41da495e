"""Scores of attention and what becomes of them, in memory: the steps of the unfused backend."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from transformer_engine.pytorch._torch_private import once_differentiable
from transformer_engine.pytorch.attention.masks.masks import Mask
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


def product(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """`scale * query @ key^T`, `[batch, heads, queries, keys]`.

    The product carries the scale, so that fp16 scores overflow no sooner than they must. The query
    heads of a group are rows of one product with the group's key: nothing is repeated.
    """
    batch, heads, queries, size = query.shape
    groups, keys = key.shape[1], key.shape[2]
    return torch.baddbmm(
        query.new_empty(1, 1, 1),  # beta = 0: never read
        query.reshape(batch * groups, heads // groups * queries, size),
        key.reshape(batch * groups, keys, size).transpose(1, 2),
        beta=0,
        alpha=scale,
    ).view(batch, heads, queries, keys)


def weights(
    scores: torch.Tensor, mask: Mask, bias: torch.Tensor | None, sink: torch.Tensor | None
) -> torch.Tensor:
    """`softmax(scores + bias)` over the keys that the mask lets through."""
    if bias is not None:
        scores = scores + bias.float()
    if sink is not None:
        return _softmax_with_sink(scores, mask, sink)
    probabilities: torch.Tensor = _MaskedSoftmax.apply(
        scores, mask.hidden, mask.left, mask.right, mask.diagonal
    )
    return probabilities


def weighted(probabilities: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`probabilities @ value`, `[batch, heads, queries, size of value]`."""
    batch, heads, queries, keys = probabilities.shape
    groups, size = value.shape[1], value.shape[-1]
    out = torch.bmm(
        probabilities.reshape(batch * groups, heads // groups * queries, keys),
        value.reshape(batch * groups, keys, size),
    )
    return out.view(batch, heads, queries, size)
