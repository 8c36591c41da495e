"""The largest score of each head, for trainers that clip weights by it (`return_max_logit`).

Backends do not keep the scores, so their product is computed once more, some queries at a time.
Ranks that share sequences also send queries or keys once more: after an exchange of heads, and for
each part of the queries of a rank with the keys of all ranks, scores are those of one rank.
"""

from __future__ import annotations

import torch

from transformer_engine.pytorch.attention.backends.dense import score_inputs
from transformer_engine.pytorch.attention.backends.scores import product
from transformer_engine.pytorch.attention.context import gather, heads
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.attention.masks.masks import Mask
from transformer_engine.pytorch.parallel.exchange import all_gather_stack

_BYTES = 64 * 1024 * 1024  # of the scores that are in memory at once


def max_logit(query: torch.Tensor, key: torch.Tensor, call: Call) -> torch.Tensor:
    """The largest of `scale * query key^T + bias` that the mask lets through, for each head.

    It is fp32 `[heads]`, with -inf for a head that sees nothing. Ranks that share sequences get the
    same result, over the queries and keys of all. They call this after attention, which has
    compared their calls.
    """
    if call.context is None:
        return _of_one_rank(query, key, call)
    if torch.compiler.is_compiling():
        from transformer_engine.pytorch.chain.outside_of_graphs import outside_of_graphs  # noqa: PLC0415

        return outside_of_graphs(_of_ranks, query, key, call)
    return _of_ranks(query, key, call)


@torch.no_grad()
def _of_ranks(query: torch.Tensor, key: torch.Tensor, call: Call) -> torch.Tensor:
    context = call.context
    assert context is not None
    if context.heads is not None:
        some_heads = max_logit(*heads.exchanged(query, key, call))
        return all_gather_stack(some_heads, context.heads).flatten()
    assert context.group is not None
    largest = _nothing_seen(query, call.shape.heads)
    for part in gather.parts_with_keys(query, key, call):
        largest = torch.maximum(largest, _of_one_rank(*part))
    # Not an all-reduce, whose maximum need not keep NaN.
    return all_gather_stack(largest, context.group).amax(0)


def _nothing_seen(query: torch.Tensor, heads: int) -> torch.Tensor:
    return query.new_full((heads,), float("-inf"), dtype=torch.float32)


@torch.no_grad()
def _of_one_rank(query: torch.Tensor, key: torch.Tensor, call: Call) -> torch.Tensor:
    query, key, mask, bias = score_inputs(query, key, call)
    batch, count, queries, _ = query.shape
    keys = key.shape[2]
    largest = _nothing_seen(query, count)
    if 0 in (batch, queries, keys):
        return largest
    step = max(1, _BYTES // (4 * batch * count * keys))
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
