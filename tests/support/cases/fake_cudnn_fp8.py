"""CPU stand-ins for cuDNN's FP8 attention kernels, which round where the kernels do."""

import torch
from fp8_reference import E4M3, decode, encode

from transformer_engine.pytorch.kernels.attention import SBHD


def taken(codes, pair, format=E4M3):
    return decode(codes, format).double() * pair[0].double()


def heads_first(x, settings, per_group=1):
    """Returns `[batch, heads, sequence, size]`, with each head repeated `per_group` times.

    `back` converts the other way.
    """
    x = x.transpose(0, 1) if settings[0] == SBHD else x
    return x.transpose(1, 2).repeat_interleave(per_group, 1)


def back(x, settings):
    x = x.transpose(1, 2)
    return (x.transpose(0, 1) if settings[0] == SBHD else x).contiguous()


def scores(q, k, settings, scale):
    found = (scale * (q @ k.mT)).float()
    _, left, right, bottom_right = settings[:4]
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    own = i + (k.shape[2] - q.shape[2] if bottom_right else 0)
    hidden = torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool)
    if left >= 0:
        hidden |= j < own - left
    if right >= 0:
        hidden |= j > own + right
    return found.masked_fill(hidden, -torch.inf)


def weights(q, k, settings, scale):
    return torch.softmax(scores(q, k, settings, scale), -1).double()


def rounded(x, pair, format=E4M3):
    return taken(encode(x, format, pair[1]), pair, format)


def inputs(query, key, value, settings, scales):
    per_group = query.shape[2] // key.shape[2]
    values = [taken(x, scales[0]) for x in (query, key, value)]
    return [
        heads_first(x, settings, n) for x, n in zip(values, (1, per_group, per_group), strict=True)
    ]


def pairs_of(*scales):
    found = torch.tensor([448.0 if scale is None else float(scale) for scale in scales])
    return torch.stack((found.reciprocal(), found), 1)


def fp8_attention_forward(query, key, value, scales, settings, scale, statistics, amaxes):
    pairs = pairs_of(*scales)
    q, k, v = inputs(query, key, value, settings, pairs)
    p = weights(q, k, settings, scale)
    # Weights are cast relative to the largest weight of the blocks of 256 keys up to their own.
    parts = p.split(256, -1)
    so_far = torch.stack([x.amax(-1, keepdim=True) for x in parts]).cummax(0).values.clamp(1e-300)
    cast = [rounded(x / y, pairs[1]) * y for x, y in zip(parts, so_far, strict=True)]
    out = torch.cat(cast, -1) @ v
    raise_all(amaxes, (p, out))
    found = encode(back(out, settings), E4M3, pairs[2][1]).flatten(-2)
    return found, scores(q, k, settings, scale).logsumexp(-1) if statistics else None, pairs


def fp8_attention_backward(grad, query, key, value, out, statistics, *options):
    pairs, scales, settings, scale, format, amaxes, _ = options
    assert grad.is_contiguous() and statistics is not None and len(scales) == 3
    scales = torch.cat((pairs, pairs_of(*scales)))
    grad, out = (x.unflatten(-1, (-1, value.shape[-1])) for x in (grad, out))
    q, k, v = inputs(query, key, value, settings, scales)
    p = weights(q, k, settings, scale)
    g = heads_first(taken(grad, scales[3], format), settings)
    o = heads_first(taken(out, scales[2]), settings)
    product = scale * p * (g @ v.mT - (g * o).sum(-1, keepdim=True))
    r, groups = rounded(product, scales[4], format), key.shape[2]
    p8 = rounded(p, scales[1])
    found = [r @ k, of_groups(r.mT @ q, groups), of_groups(p8.mT @ g, groups)]
    raise_all(amaxes, (product, *found))
    return *(encode(back(x, settings), format, scales[5][1]) for x in found), scales[5]


def of_groups(x, groups):
    return x.view(x.shape[0], groups, -1, *x.shape[2:]).sum(2)


def attention_backward(grad, query, key, value, out, statistics, settings, scale, *rest):
    """The backward in 16 bit, as `kernels/attention.py` documents it."""
    assert grad.is_contiguous() and statistics is not None
    dtype, groups = query.dtype, key.shape[2]
    grad, out = (x.unflatten(-1, (-1, value.shape[-1])) for x in (grad, out))
    assert all(x.dtype is dtype is not torch.float32 for x in (grad, key, value, out))
    per_group = query.shape[2] // groups
    q, k, v, g, o = (
        heads_first(x.double(), settings, n)
        for x, n in zip(
            (query, key, value, grad, out), (1, per_group, per_group, 1, 1), strict=True
        )
    )
    assert statistics.is_contiguous() and statistics.shape == q.shape[:-1]
    # `statistics` may come from a softmax over more keys than these.
    p = torch.exp(scores(q, k, settings, scale) - statistics.unsqueeze(-1)).double()
    product = scale * p * (g @ v.mT - (g * o).sum(-1, keepdim=True))
    found = (product @ k, of_groups(product.mT @ q, groups), of_groups(p.mT @ g, groups))
    return *(back(x, settings).to(dtype) for x in found), None, None


def raise_all(amaxes, tensors):
    for amax, x in zip(amaxes, tensors, strict=True):
        if amax is not None:
            amax.clamp_(min=float(x.abs().max()))
