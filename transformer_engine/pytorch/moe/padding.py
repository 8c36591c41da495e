"""Tokens sorted by expert, with each expert's rows padded, as FP8 GEMMs require."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transformer_engine.pytorch.module.arguments import check_sizes
from transformer_engine.pytorch.module.inputs import as_tensor, can_read, check_tensors
from transformer_engine.pytorch.moe.permutation import moe_permute_with_probs, padded_places

__all__ = ["moe_permute_and_pad_with_probs"]

Padded = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]


def moe_permute_and_pad_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    tokens_per_expert: torch.Tensor | Sequence[int],
    align_size: int,
) -> Padded:
    """`moe_permute_with_probs`, with rows of zeros behind those of each expert.

    `GroupedLinear` pads by itself where it must; this pads once for several layers. The host waits
    for `tokens_per_expert` if that is on a GPU.

    Args:
        inp: `[tokens, hidden]`.
        probs: `[tokens, experts]`.
        routing_map: bool or 0 and 1 `[tokens, experts]`.
        tokens_per_expert: `[experts]`, integers: the sums of the columns of the routing map.
        align_size: the rows of each expert are padded to a multiple of it; an expert without tokens
            has no rows.

    Returns:
        `(rows, weights, row_id_map, pad_offsets, padded_tokens_per_expert)`: rows
        `[padded rows, hidden]`; weights `[padded rows]`, zero where padded; `row_id_map` and
        `pad_offsets` for `moe_unpermute`, the latter None where nothing is padded;
        `padded_tokens_per_expert`, a tensor like `tokens_per_expert`, adds up to the padded rows.

    Raises:
        ValueError: no `tokens_per_expert`, or another number of them than of experts; `align_size`
            below 1; see `moe_permute_with_probs`. On a CPU, numbers that differ from the map's.
        TypeError: `align_size` is not an int, `tokens_per_expert` not integers of 32 or 64 bits;
            see `moe_permute`.

    >>> probs = torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    >>> rows, weights, row_id_map, pad_offsets, padded = moe_permute_and_pad_with_probs(
    ...     torch.tensor([[1.0], [2.0]]), probs, probs > 0, torch.tensor([2, 1]), align_size=2
    ... )
    >>> rows.flatten(), weights, padded
    (tensor([1., 2., 1., 0.]), tensor([0.2500, 1.0000, 0.7500, 0.0000]), tensor([2, 2]))
    """
    op = "moe_permute_and_pad_with_probs"
    check_sizes(op, None, align_size=align_size)
    check_tensors(op, inp=inp, probs=probs, routing_map=routing_map)
    if tokens_per_expert is None:
        raise ValueError(f"[{op}] expected tokens_per_expert, got None")
    counts = as_tensor(op, "tokens_per_expert to be integers", tokens_per_expert)
    if counts.shape != routing_map.shape[1:]:
        raise ValueError(
            f"[{op}] expected tokens_per_expert of shape {tuple(routing_map.shape[1:])}, one for "
            f"each expert, got {tuple(counts.shape)}"
        )
    if counts.dtype not in (torch.int32, torch.int64):  # padded numbers may not fit in fewer bits
        raise TypeError(
            f"[{op}] expected tokens_per_expert of integers of 32 or 64 bits, got {counts.dtype}"
        )
    if can_read(routing_map) and not torch.equal(counts.cpu().long(), routing_map.bool().sum(0)):
        raise ValueError(
            f"[{op}] expected tokens_per_expert={routing_map.bool().sum(0).tolist()}, the sums of "
            f"the routing map, got {counts.tolist()}"
        )
    padded = (counts + align_size - 1) // align_size * align_size
    count, padded_count = torch.stack([counts.sum(), padded.sum()]).tolist()
    rows, weights, row_id_map = moe_permute_with_probs(inp, probs, routing_map, count)
    if count == padded_count:
        return rows, weights, row_id_map, None, padded
    missing = (padded - counts).to(inp.device, torch.int64)
    pad_offsets = missing.cumsum(0) - missing
    places = padded_places(row_id_map, pad_offsets)
    rows = rows.new_zeros(padded_count, rows.shape[1]).index_copy(0, places, rows)
    weights = weights.new_zeros(padded_count).index_copy(0, places, weights)
    return rows, weights, row_id_map, pad_offsets, padded
