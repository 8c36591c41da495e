"""The largest score of each head, for trainers that clip weights by it (`return_max_logit`).

Backends do not keep the scores, so their product is computed once more, some queries at a time.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from transformer_engine.pytorch.attention.backends.dense import score_inputs
from transformer_engine.pytorch.attention.backends.scores import product
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.attention.masks.masks import Mask

_BYTES = 64 * 1024 * 1024  # of the scores that are in memory at once


@torch.no_grad()
def max_logit(query: torch.Tensor, key: torch.Tensor, call: Call) -> torch.Tensor:
    """The largest of `scale * query key^T + bias` that the mask lets through, for each head.

    It is fp32 `[heads]`, with -inf for a head that sees nothing.
    """
    query, key, mask, bias = score_inputs(query, key, call)
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    largest = query.new_full((heads,), float("-inf"), dtype=torch.float32)
    if 0 in (batch, queries, keys):
        return largest
    step = max(1, _BYTES // (4 * batch * heads * keys))
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        scores = product(query[:, :, start:stop], key, call.scale).float()
        if bias is not None:
            scores += _rows(bias, start, stop).float()
        hidden = _rows_of_mask(mask, start, stop).dense(stop - start, keys, query.device)
        if hidden is not None:
            scores = scores.masked_fill_(hidden, float("-inf"))
        largest = torch.maximum(largest, scores.amax((0, 2, 3)))
    return largest


def _rows(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The rows of these queries, of a tensor that broadcasts to `[batch, heads, queries, keys]`."""
    return x[..., start:stop, :] if x.shape[-2] > 1 else x


def _rows_of_mask(mask: Mask, start: int, stop: int) -> Mask:
    hidden = mask.hidden
    if hidden is not None and hidden.dim() > 1:
        hidden = _rows(hidden, start, stop)
    return Mask(hidden, mask.left, mask.right, mask.diagonal + start)


def refuse_ranks(layer: str) -> NoReturn:
    """Raise NotImplementedError for context parallel ranks."""
    raise NotImplementedError(
        "[DotProductAttention] return_max_logit=True is not implemented for ranks that share"
        f" sequences (cp_group): no rank has all keys (layer {layer})"
    )
