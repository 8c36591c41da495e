"""CPU stand-ins for cuDNN's attention kernels, following the text of `kernels/attention.py`."""

import torch

from transformer_engine.pytorch.attention import core_attention as core
from transformer_engine.pytorch.attention.backends import cudnn
from transformer_engine.pytorch.attention.masks.alibi import default_slopes
from transformer_engine.pytorch.kernels import attention as kernels
from transformer_engine.pytorch.kernels.attention import SBHD, THD

BACKEND = cudnn.BACKEND._replace(recordable=lambda call: False)  # stand-ins compute with torch


def attention_forward(query, key, value, *options_and_statistics):
    *options, statistics = options_and_statistics
    with torch.no_grad():
        out = attend((query, key, value), *options)
        found = log_sum_exp((query, key, value), *options) if statistics else None
    return out.flatten(-2), found


def attention_backward(grad, query, key, value, out, statistics, *options_and_needs):
    settings, scale, dropout, sequences, bias, sink, seed, needs_bias, needs_sink, together = (
        options_and_needs
    )
    assert together == kernels.AS_INPUTS
    assert grad.is_contiguous() and grad.shape == out.shape and statistics is not None
    wanted = [True, True, True, needs_bias, needs_sink]
    inputs = [
        None if x is None else x.detach().requires_grad_(want)
        for x, want in zip((query, key, value, bias, sink), wanted, strict=True)
    ]
    with torch.enable_grad():
        again = attend(inputs[:3], settings, scale, dropout, sequences, *inputs[3:], seed)
        again = again.flatten(-2)
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(again, leaves, grad))
    return tuple(next(found) if x is not None and x.requires_grad else None for x in inputs)


def serve(monkeypatch):
    """Routes all attention to the cuDNN backend, with these functions in place of `_C`'s.

    The operators above `_C` stay the real ones.
    """

    def forward(inputs, *options_and_results):
        *options, extras, results = options_and_results
        results[0].copy_(attend(inputs, *options, *extras).flatten(-2))

    def backward(inputs, *options_and_results):
        *options, extras, saved, (grad, *written) = options_and_results
        how = *options, *extras, *(x is not None for x in written[3:]), kernels.AS_INPUTS
        found = attention_backward(grad, *inputs, *saved, *how)
        for memory, gradient in zip(written, found, strict=True):
            if memory is not None:
                memory.copy_(gradient)

    monkeypatch.setattr(kernels._C, "attention_forward", forward)
    monkeypatch.setattr(kernels._C, "attention_backward", backward)
    monkeypatch.setattr(core, "choose", lambda *facts: BACKEND)


def batches(inputs, settings, sequences):
    """Returns `[batch, sequence, heads, size]` of all inputs, with sequences of thd padded."""
    format, *_, longest_query, longest_key = settings
    if format != THD:
        return [x.transpose(0, 1) if format == SBHD else x for x in inputs]
    ends, starts = sequences[:2], sequences[2:]
    assert max(int(e.diff().max()) for e in ends) <= max(longest_query, longest_key)
    sides = ((0, longest_query), (1, longest_key), (1, longest_key))
    return [
        padded(x, ends[i], starts[i], longest)
        for x, (i, longest) in zip(inputs, sides, strict=True)
    ]


def log_sum_exp(inputs, settings, scale, dropout, sequences, bias, sink, seed):
    """Returns `[batch, heads, queries]`, or `[tokens, heads]` for thd.

    The value is +inf for a query that sees no key.
    """
    q, k, _ = batches(inputs, settings, sequences)
    format, left, right, bottom_right, alibi = settings[:5]
    mask = seen(q, k, sequences[:2], left, right, bottom_right)
    s = scores(q, k, scale, bias, alibi).masked_fill(~mask, -torch.inf)
    if sink is not None:
        s = torch.cat((s, sink.double().view(1, -1, 1, 1).expand(*s.shape[:-1], 1)), -1)
    found = s.logsumexp(-1).masked_fill(~mask.any(-1), torch.inf).float()
    if format == THD:
        return packed(found.transpose(1, 2), sequences[0], sequences[2], inputs[0].shape[0])
    return found


def attend(inputs, settings, scale, dropout, sequences, bias, sink, seed):
    """Attention from its definition, for the integer settings of the kernels.

    The settings are format, left and right window, bottom-right alignment and ALiBi; `sequences`
    holds the ends of the sequences, then their starts in memory.
    """
    query = inputs[0]
    q, k, v = batches(inputs, settings, sequences)
    format, left, right, bottom_right, alibi = settings[:5]
    ends, starts = sequences[:2], sequences[2:]
    weights = softmax(
        scores(q, k, scale, bias, alibi), seen(q, k, ends, left, right, bottom_right), sink
    )
    if dropout > 0.0:
        draw = torch.Generator().manual_seed(int(seed.sum()))
        weights = weights * (torch.rand(weights.shape, generator=draw) >= dropout) / (1 - dropout)
    groups = q.shape[2] // v.shape[2]
    out = torch.einsum("bhij,bjhd->bihd", weights, v.double().repeat_interleave(groups, 2))
    out = out.to(query.dtype)
    if format == THD:
        return packed(out, ends[0], starts[0], query.shape[0])
    return (out.transpose(0, 1) if format == SBHD else out).contiguous()


def scores(q, k, scale, bias, alibi):
    k = k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k) * scale
    if bias is not None:
        s = s + bias.double()
    if alibi:
        distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None]
        s = s + default_slopes(q.shape[2], q.device).double() * distance
    return s


def seen(q, k, ends, left, right, bottom_right):
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    query_lengths, key_lengths = (
        torch.full((batch,), size) if e is None else e.diff()
        for e, size in zip(ends, (queries, keys), strict=True)
    )
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    query_lengths, key_lengths = query_lengths.view(-1, 1, 1, 1), key_lengths.view(-1, 1, 1, 1)
    own = i + (key_lengths - query_lengths if bottom_right else 0)
    mask = (i < query_lengths) & (j < key_lengths)
    if left >= 0:
        mask = mask & (j >= own - left)
    return mask & (j <= own + right) if right >= 0 else mask


def softmax(s, mask, sink):
    s = s.masked_fill(~mask, -torch.inf)
    if sink is not None:
        assert sink.dtype is torch.float32
        s = torch.cat((s, sink.double().view(1, -1, 1, 1).expand(*s.shape[:-1], 1)), -1)
    blind = ~mask.any(-1, keepdim=True)
    weights = torch.softmax(s.masked_fill(blind, 0), -1)[..., : mask.shape[-1]]
    return weights.masked_fill(blind, 0)


def rows(ends, starts):
    begins = (ends if starts is None else starts)[:-1]
    return [slice(b, b + n) for b, n in zip(begins.tolist(), ends.diff().tolist(), strict=True)]


def padded(x, ends, starts, longest):
    parts = [x[row] for row in rows(ends, starts)]
    return torch.stack([torch.cat((p, x.new_zeros(longest - len(p), *x.shape[1:]))) for p in parts])


def packed(x, ends, starts, tokens):
    out = x.new_zeros(tokens, *x.shape[2:])
    for row, part in zip(rows(ends, starts), x, strict=True):
        out[row] = part[: row.stop - row.start]
    return out
