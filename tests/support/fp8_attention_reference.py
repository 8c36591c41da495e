"""FP8 attention from its definition, in float64 and without autograd."""

import math
from typing import NamedTuple

import torch
from fp8_reference import E4M3, E5M2, amax, decode, encode

# Columns of the scaling state. The forward state has (input, weight, output) of each of three
# GEMMs, the backward state (grad output, grad input) of each.
QKV, OUT, SOFTMAX = 2, 3, 8
GRAD_QKV, GRAD_OUT, GRAD_PRODUCT = 0, 3, 5


class Result(NamedTuple):
    """Results of a call before their last cast, and the recorded amaxes by column.

    Attributes:
        out: `[batch, queries, heads, size]`.
        gradients: gradients of query, key and value.
        forward: amaxes of columns of the forward state.
        backward: amaxes of columns of the backward state.
    """

    out: torch.Tensor
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    forward: dict[int, float]
    backward: dict[int, float]


def fp8(x, scale, format=E4M3):
    """Casts `x` to FP8 and back to float64."""
    return decode(encode(x, format, scale), format).double() / scale.double()


def heads_first(x, per_group=1):
    return x.detach().cpu().double().transpose(1, 2).repeat_interleave(per_group, dim=1)


def of_groups(x, per_group):
    """Sums the gradients of repeated heads: returns `[batch, sequence, groups, size]`."""
    batch, heads, sequence, size = x.shape
    grouped = x.view(batch, heads // per_group, per_group, sequence, size)
    return grouped.sum(2).transpose(1, 2)


def attention(inputs, grad, seen, scales, bias=0.0, of_grads=E5M2):
    """Attention of tensors `[batch, sequence, heads, size]`.

    `scales` are those of the forward and of the backward state. `of_grads` is the FP8 format of
    gradients, or None if gradients are not cast.
    """

    def cast(x, column):
        return x if of_grads is None else fp8(x, backward[column], of_grads)

    query, key, value = inputs
    forward, backward = (x.cpu() for x in scales)
    per_group, scale = query.shape[2] // key.shape[2], 1 / math.sqrt(query.shape[-1])
    q, k, v = (fp8(heads_first(x), forward[QKV]) for x in (query, key, value))
    k, v = (x.repeat_interleave(per_group, dim=1) for x in (k, v))
    scores = scale * (q @ k.mT) + bias
    blind = ~seen.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~seen & ~blind, -math.inf), -1)
    weights = weights.masked_fill(blind, 0.0)
    rounded = fp8(weights, forward[SOFTMAX])
    out = rounded @ v
    grad_out = cast(heads_first(grad), GRAD_OUT)
    grad_weights = grad_out @ v.mT
    centre = (weights * grad_weights).sum(-1, keepdim=True)
    exact = scale * weights * (grad_weights - centre)
    grad_product = cast(exact, GRAD_PRODUCT)
    gradients = (
        (grad_product @ k).transpose(1, 2),
        of_groups(grad_product.mT @ q, per_group),
        of_groups(rounded.mT @ grad_out, per_group),
    )
    largest = max(amax(x.detach()) for x in inputs)
    return Result(
        out.transpose(1, 2),
        gradients,
        {QKV: largest, SOFTMAX: amax(weights), OUT: amax(out)},
        {
            GRAD_OUT: amax(grad),
            GRAD_PRODUCT: amax(exact),
            GRAD_QKV: max(amax(g) for g in gradients),
        },
    )
