"""Attention from scores in memory: the kernel of the unfused backend.

    weights = softmax(scale * query @ key^T + bias)        over the keys that the mask lets through
    result  = dropout(weights) @ value

In FP8 attention, which `unfused_fp8.py` defines, the kernel casts the weights after dropout, and
the gradient of `query @ key^T`. The functions that call the kernel cast all other tensors.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from transformer_engine.pytorch.attention.backends.backend import Gradients, Inputs, Needs, Saved
from transformer_engine.pytorch.attention.backends.dense import Kernel
from transformer_engine.pytorch.attention.backends.dropout import dropout, dropout_backward
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.attention.masks.masks import Mask
from transformer_engine.pytorch.kernels.softmax import softmax_backward, softmax_forward


def _forward(
    inputs: Inputs, mask: Mask, bias: torch.Tensor | None, call: Call, needs: Needs
) -> tuple[torch.Tensor, Saved | None]:
    """See `dense.Kernel`."""
    (query, key, value), casts, sink = inputs, call.casts, call.sink.offset
    weights = _softmax(scaled_product(query, key, call), mask, bias, sink)
    factor = weights if sink is None else weights[..., : key.shape[2]]
    if factor.dtype is not query.dtype:
        factor = factor.to(query.dtype)
    dropped = None
    if call.dropout.p > 0.0:
        factor, dropped = dropout(factor, call.dropout.p)
    if casts is not None:
        factor = casts.softmax.cast(factor, torch.float32)
    out = weighted(factor, value)
    if not any(needs):
        return out, None
    inner = (value, weights, dropped) if needs.weights else (None, None, None)
    return out, Saved(
        None,
        (
            query if needs.key else None,
            key if needs.query else None,
            factor if needs.value else None,
            *inner,
        ),
        None if sink is None else sink.dtype,
    )


def _backward(grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
    """See `dense.Kernel`."""
    query, key, factor, value, weights, dropped = saved.tensors
    batch, heads, queries, size = grad.shape
    groups = call.shape.groups
    rows = (batch * groups, heads // groups * queries)
    grad_value = grad_bias = grad_sink = None
    grad = grad.reshape(*rows, size)
    if factor is not None:
        keys = factor.shape[-1]
        grad_value = torch.bmm(factor.reshape(*rows, keys).transpose(1, 2), grad)
        grad_value = grad_value.view(batch, groups, keys, size)
    if value is None or weights is None:
        return Gradients(None, None, grad_value)

    keys, dtype = value.shape[2], grad.dtype
    columns = value.reshape(batch * groups, keys, size).transpose(1, 2)
    grad_scores = torch.bmm(grad, columns).view(batch, heads, queries, keys)
    if dropped is not None:
        grad_scores = dropout_backward(grad_scores, dropped, call.dropout.p)
    grad_scores = grad_scores.to(weights.dtype)
    if saved.facts is not None:
        grad_scores = pad(grad_scores, (0, 1))
    grad_scores = softmax_backward(grad_scores.contiguous(), weights, 1.0)
    if saved.facts is not None:
        grad_scores, column = grad_scores[..., :keys], grad_scores[..., keys:]
        if needs.sink:
            grad_sink = column.float().sum((0, 2, 3)).to(saved.facts)
    if needs.bias:
        grad_bias = grad_scores
    found = scaled_product_backward(grad_scores.to(dtype), query, key, groups, call)
    return Gradients(*found, grad_value, grad_bias, grad_sink)


def scaled_product(query: torch.Tensor, key: torch.Tensor, call: Call) -> torch.Tensor:
    """`product` with the scale of a call; in FP8 attention, the scale is applied to the result."""
    if call.casts is None:
        return product(query, key, call.scale)
    return product(query, key, 1.0) * call.scale


def scaled_product_backward(
    grad: torch.Tensor,
    query: torch.Tensor | None,
    key: torch.Tensor | None,
    groups: int,
    call: Call,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The backward of `scaled_product`; in FP8 attention it casts the scaled gradient first."""
    if call.casts is None:
        return product_backward(grad, query, key, groups, call.scale)
    grad, slot = grad * call.scale, call.casts.grad_product
    if slot is not None:
        grad = slot.cast(grad, grad.dtype)
    return product_backward(grad, query, key, groups, 1.0)


def product(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """`scale * query @ key^T`, `[batch, heads, queries, keys]`.

    The product applies the scale before it rounds its result, so that fp16 scores overflow only if
    the scaled values do. The query heads of a group become rows of one product with the group's
    keys, so that keys need not be repeated.
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


def product_backward(
    grad: torch.Tensor,
    query: torch.Tensor | None,
    key: torch.Tensor | None,
    groups: int,
    scale: float,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of query and key.

    The gradient of query needs `key`, and the gradient of key needs `query`; it is None without.
    """
    batch, heads, queries, keys = grad.shape
    rows = (batch * groups, heads // groups * queries)
    grad = grad.reshape(*rows, keys)
    grad_query = grad_key = None
    if key is not None:
        size = key.shape[-1]
        grad_query = torch.bmm(grad, key.reshape(batch * groups, keys, size)) * scale
        grad_query = grad_query.view(batch, heads, queries, size)
    if query is not None:
        size = query.shape[-1]
        grad_key = torch.bmm(query.reshape(*rows, size).transpose(1, 2), grad) * scale
        grad_key = grad_key.transpose(1, 2).reshape(batch, groups, keys, size)
    return grad_query, grad_key


def _softmax(
    scores: torch.Tensor, mask: Mask, bias: torch.Tensor | None, sink: torch.Tensor | None
) -> torch.Tensor:
    """`softmax(scores + bias)` over the keys that the mask lets through, and over the sink.

    Every query sees the sink as one more key, which comes last. A query that sees no other key
    gives its whole weight to the sink: its weights for keys are zero, and so is its gradient.
    """
    if bias is not None:
        scores = scores + bias.float()
    if sink is None:
        return softmax_forward(scores, mask.hidden, 1.0, mask.left, mask.right, mask.diagonal)
    batch, heads, queries, keys = scores.shape
    hidden = mask.dense(queries, keys, scores.device)
    if hidden is not None:
        hidden = pad(hidden.expand(*hidden.shape[:-1], keys), (0, 1))
    column = sink.float().view(1, heads, 1, 1).expand(batch, heads, queries, 1)
    with_sink = torch.cat((scores, column.to(scores.dtype)), dim=-1)
    return softmax_forward(with_sink, hidden, 1.0, -1, -1, 0)


def weighted(factor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`factor @ value`, `[batch, heads, queries, size of value]`."""
    batch, heads, queries, keys = factor.shape
    groups, size = value.shape[1], value.shape[-1]
    out = torch.bmm(
        factor.reshape(batch * groups, heads // groups * queries, keys),
        value.reshape(batch * groups, keys, size),
    )
    return out.view(batch, heads, queries, size)


KERNEL = Kernel(_forward, _backward)
