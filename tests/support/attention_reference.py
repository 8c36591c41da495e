"""Attention in float64, computed from its definition. Masks and ALiBi go through single scores."""

import math
from functools import cache

import torch

MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)


def sees(mask_type, window, i, j, real_queries, real_keys):
    """Whether query i of a sequence sees key j, as the documentation of the mask types says."""
    if "padding" in mask_type and (i >= real_queries or j >= real_keys):
        return False
    top_left = mask_type in ("causal", "padding_causal")
    diagonal = i + (0 if top_left else real_keys - real_queries)
    if "causal" in mask_type and j > diagonal:
        return False
    left, right = window or (-1, -1)
    return (left < 0 or j >= diagonal - left) and (right < 0 or j <= diagonal + right)


@cache
def _seen(mask_type, window, queries, keys, real_queries, real_keys):
    """Returns the mask of one sequence for `seen_keys`, as nested lists."""
    return [
        [sees(mask_type, window, i, j, real_queries, real_keys) for j in range(keys)]
        for i in range(queries)
    ]


def seen_keys(mask_type, window, queries, keys, lengths, arbitrary=None):
    """Bool `[batch, 1, queries, keys]`, True where a query sees a key.

    `lengths` holds one pair of real queries and real keys per sequence. Only padding mask types
    read it; with other types all tokens are real.
    """
    padded = "padding" in mask_type
    whole = (queries, keys)
    masks = [_seen(mask_type, window, *whole, *(real if padded else whole)) for real in lengths]
    seen = torch.tensor(masks, dtype=torch.bool).view(len(lengths), 1, queries, keys)
    return seen if arbitrary is None else seen & ~arbitrary


def slopes_of(heads):
    n = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * k / n) for k in range(1, n + 1)]
    more = [2 ** (-4 * (2 * k - 1) / n) for k in range(1, heads - n + 1)]
    return torch.tensor(first + more, dtype=torch.float64)


@cache
def _distances(queries, keys, real_queries, real_keys):
    return [[abs(i + real_keys - real_queries - j) for j in range(keys)] for i in range(queries)]


def alibi(slopes, queries, keys, lengths):
    """Bias `[batch, heads, queries, keys]`; `lengths` holds pairs of real queries and real keys."""
    distances = [_distances(queries, keys, *real) for real in lengths]
    distance = torch.tensor(distances, dtype=torch.float64).view(len(lengths), 1, queries, keys)
    return -slopes.view(-1, slopes.shape[-1], 1, 1) * distance


def attention(
    query, key, value, seen, scale=None, pre_bias=None, post_bias=None, dropout_mask=None
):
    """Attention of `[batch, queries, heads, size]`, in float64.

    The result is `[batch, queries, heads, size of value]`. Dropout multiplies the softmax weights
    by `dropout_mask`.
    """
    query, key, value = (x.double().transpose(1, 2) for x in (query, key, value))
    per_group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(per_group, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2)
    if pre_bias is not None:
        scores = scores + pre_bias.double()
    scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if post_bias is not None:
        scores = scores + post_bias.double()
    blind = ~seen.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~seen & ~blind, -math.inf), dim=-1)
    weights = weights.masked_fill(blind, 0.0)
    return ((weights if dropout_mask is None else weights * dropout_mask) @ value).transpose(1, 2)
