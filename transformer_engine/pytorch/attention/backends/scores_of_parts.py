"""Attention with a part of the keys, from scores in memory.

    lse     = logsumexp(scale * query @ key^T + bias)   over the keys that the mask lets through
    weights = exp(scale * query @ key^T + bias - lse)

The backward computes the weights again, with the log-sum-exp over all keys.

In FP8 attention the kernel casts the same tensors as `scores.py`: the weights after dropout, and
the gradient of `query @ key^T`. In the forward the weights are those of the softmax over this
part's keys, in the backward those of the softmax over all keys.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from transformer_engine.pytorch.attention.backends.backend import (
    Gradients,
    Inputs,
    KernelParts,
    Needs,
    Saved,
)
from transformer_engine.pytorch.attention.backends.dense import Kernel
from transformer_engine.pytorch.attention.backends.dropout import dropout, dropout_backward
from transformer_engine.pytorch.attention.backends.scores import (
    scaled_product,
    scaled_product_backward,
    weighted,
)
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.attention.masks.masks import Mask


class _Rest(NamedTuple):
    """What the backward reads beside query, key, value and result."""

    bias: torch.Tensor | None
    hidden: torch.Tensor | None
    dropped: torch.Tensor | None


def _forward(
    inputs: Inputs, mask: Mask, bias: torch.Tensor | None, call: Call, needs: Needs
) -> tuple[torch.Tensor, Saved | None]:
    """See `dense.Kernel`."""
    query, key, value = inputs
    hidden = mask.dense(query.shape[2], key.shape[2], query.device)
    rest = _Rest(bias, hidden, None)
    scores = _scores(query, key, rest, call)
    lse = scores.logsumexp(-1)
    factor = _weights(scores, lse).to(query.dtype)
    if call.dropout.p > 0.0:
        factor, dropped = dropout(factor, call.dropout.p)
        rest = rest._replace(dropped=dropped)
    if call.casts is not None:
        factor = call.casts.softmax.cast(factor, factor.dtype)
    out = weighted(factor, value)
    return out, Saved(lse, (query, key, value, out, *rest))


def _backward(grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
    """See `dense.Kernel`."""
    query, key, value, out = saved.tensors[:4]
    rest = _Rest(*saved.tensors[4:])
    assert saved.log_sum_exp is not None
    batch, heads, queries, size = grad.shape
    groups, keys, dtype = key.shape[1], key.shape[2], grad.dtype
    lead = (batch * groups, heads // groups * queries)
    weights = _weights(_scores(query, key, rest, call), saved.log_sum_exp)
    factor = weights.to(dtype)
    if rest.dropped is not None:
        factor = factor * rest.dropped / _kept_share(rest.dropped, call.dropout.p)
    if call.casts is not None:
        factor = call.casts.softmax.cast(factor, dtype)
    rows = grad.reshape(*lead, size)
    grad_value = torch.bmm(factor.reshape(*lead, keys).transpose(1, 2), rows)
    columns = value.reshape(batch * groups, keys, size).transpose(1, 2)
    grad_scores = torch.bmm(rows, columns).view(batch, heads, queries, keys)
    if rest.dropped is not None:
        grad_scores = dropout_backward(grad_scores, rest.dropped, call.dropout.p)
    mean = (grad.float() * out.float()).sum(-1, keepdim=True)
    exact = weights * (grad_scores.float() - mean)
    found = scaled_product_backward(exact.to(dtype), query, key, groups, call)
    bias = exact if needs.bias else None
    return Gradients(*found, grad_value.view(batch, groups, keys, size), bias)


def _scores(query: torch.Tensor, key: torch.Tensor, rest: _Rest, call: Call) -> torch.Tensor:
    """Scores in fp32, -inf where the mask hides a key."""
    scores = scaled_product(query, key, call).float()
    if rest.bias is not None:
        scores = scores + rest.bias.float()
    return scores if rest.hidden is None else scores.masked_fill(rest.hidden, -math.inf)


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Attention weights in fp32, zero where a query sees no key."""
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(-1))


def _kept_share(dropped: torch.Tensor, p: float) -> float:
    """What `dropped` must still be divided by: 1 - p for a mask of bool, 1 for factors."""
    return 1.0 - p if dropped.dtype is torch.bool else 1.0


def _log_sum_exp(saved: Saved) -> torch.Tensor:
    assert saved.log_sum_exp is not None
    return saved.log_sum_exp


def _restore(stripped: Saved, tensors: tuple[torch.Tensor, ...], lse: torch.Tensor) -> Saved:
    return Saved(lse, (*tensors, *stripped.tensors), stripped.facts)


PARTS = KernelParts(_log_sum_exp, Saved.stripped, _restore)
KERNEL_OF_PARTS = Kernel(_forward, _backward)
