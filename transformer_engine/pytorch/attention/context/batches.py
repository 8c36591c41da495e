"""Prepares packed batches of token ids for context parallelism.

Each sequence is padded to a length that can be cut into chunks, its tokens get position ids, and
each rank takes its chunks of ids, labels and positions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.pytorch.attention.context.sequences import shard_sequence
from transformer_engine.pytorch.module.arguments import check_sizes
from transformer_engine.pytorch.module.inputs import check_cu_seqlens, check_rise, check_tensors


def pad_thd_sequences_for_cp(
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    cu_seqlens: torch.Tensor,
    divisibility_factor: int,
    padding_token_id: int = 0,
    padding_label_id: int = -100,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad every packed sequence to a multiple of a length.

    Args:
        input_ids: `[tokens]` or `[1, tokens]`, of any dtype.
        labels: likewise.
        cu_seqlens: int32 or int64 `[batch + 1]`, where each sequence begins, and the last one ends.
        divisibility_factor: twice the number of context parallel ranks, or a multiple of that.
        padding_token_id: id that is appended to the tokens of each sequence.
        padding_label_id: label that is appended to the labels of each sequence.

    Returns:
        Ids and labels `[padded tokens]`, and `cu_seqlens` of the padded sequences.

    Raises:
        ValueError: ids or labels of another number of tokens than `cu_seqlens`; a factor below 1.
        TypeError: arguments that are no tensors, a factor that is no int, or `cu_seqlens` of
            another dtype.

    Example:
        >>> ids, ends = torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])
        >>> pad_thd_sequences_for_cp(ids, ids, ends, 2)
        (tensor([1, 2, 3, 0]), tensor([   1,    2,    3, -100]), tensor([0, 2, 4]))
    """
    op = "pad_thd_sequences_for_cp"
    check_tensors(op, input_ids=input_ids, labels=labels)
    ends = _padded_ends(op, cu_seqlens, divisibility_factor)
    tokens, total = int(cu_seqlens[-1]), int(ends[-1])
    moved = (ends - cu_seqlens)[:-1].repeat_interleave(cu_seqlens.diff())
    position = torch.arange(tokens, device=ends.device) + moved
    padded = []
    pads = {"input_ids": (input_ids, padding_token_id), "labels": (labels, padding_label_id)}
    for name, (x, pad) in pads.items():
        if x.shape not in ((tokens,), (1, tokens)):
            raise ValueError(
                f"[{op}] expected {name} of shape ({tokens},) or (1, {tokens}), the tokens of"
                f" cu_seqlens, got {tuple(x.shape)}"
            )
        padded.append(x.new_full((total,), pad).index_copy_(0, position, x.reshape(-1)))
    return padded[0], padded[1], ends


def generate_positional_ids_for_cp(
    cu_seqlens: torch.Tensor, divisibility_factor: int, dtype: torch.dtype = torch.long
) -> torch.Tensor:
    """The position in its sequence of each token that `pad_thd_sequences_for_cp` returns.

    Args:
        cu_seqlens: that of the sequences without padding, as for `pad_thd_sequences_for_cp`.
        divisibility_factor: see `pad_thd_sequences_for_cp`.
        dtype: of the result.

    Returns:
        `[padded tokens]`.

    Raises:
        ValueError: see `pad_thd_sequences_for_cp`.
        TypeError: see `pad_thd_sequences_for_cp`.

    Example:
        >>> generate_positional_ids_for_cp(torch.tensor([0, 2, 3]), 2)
        tensor([0, 1, 0, 1])
    """
    ends = _padded_ends("generate_positional_ids_for_cp", cu_seqlens, divisibility_factor)
    starts = ends[:-1].repeat_interleave(ends.diff())
    return (torch.arange(starts.shape[0], device=ends.device) - starts).to(dtype)


def get_batch_on_this_cp_rank(
    cu_seqlens_padded: torch.Tensor,
    input_ids_padded: torch.Tensor,
    labels_padded: torch.Tensor,
    position_ids_padded: torch.Tensor,
    cp_group: Any = None,
    qvk_format: str = "thd",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's part of a packed batch: the tokens that `shard_sequence` gives to this rank.

    Args:
        cu_seqlens_padded: int32 or int64 `[batch + 1]`; every length is a multiple of twice the
            number of ranks.
        input_ids_padded: `[padded tokens]` or `[1, padded tokens]`.
        labels_padded: likewise.
        position_ids_padded: likewise.
        cp_group: see `shard_sequence`; None for all ranks.
        qvk_format: `thd`.

    Returns:
        Ids, labels and positions of this rank, with the dimensions that they had.

    Raises:
        ValueError: another format; sequences that cannot be cut into chunks, or whose lengths do
            not add up to the number of tokens.
        TypeError: arguments that are no tensors, `cu_seqlens_padded` of another dtype, or a
            `cp_group` that is no process group.
    """
    op = "get_batch_on_this_cp_rank"
    if qvk_format != "thd":
        raise ValueError(f"[{op}] expected qvk_format='thd', got {qvk_format!r}")
    if cp_group is None and dist.is_available() and dist.is_initialized():
        cp_group = dist.group.WORLD

    def own_part(name: str, x: torch.Tensor) -> torch.Tensor:
        check_tensors(op, **{name: x})
        if x.ndim == 0:
            raise ValueError(f"[{op}] expected {name} of shape (tokens,) or (1, tokens), got ()")
        if x.ndim == 2 and x.shape[0] == 1:
            return own_part(name, x[0])[None]
        return shard_sequence(x, cp_group, cu_seqlens=cu_seqlens_padded)

    check_cu_seqlens(op, "cu_seqlens_padded", cu_seqlens_padded, torch.int32, torch.int64)
    return (
        own_part("input_ids_padded", input_ids_padded),
        own_part("labels_padded", labels_padded),
        own_part("position_ids_padded", position_ids_padded),
    )


def _padded_ends(op: str, cu_seqlens: torch.Tensor, factor: int) -> torch.Tensor:
    check_sizes(op, None, divisibility_factor=factor)
    check_cu_seqlens(op, "cu_seqlens", cu_seqlens, torch.int32, torch.int64)
    check_rise(op, "cu_seqlens", cu_seqlens)
    padded = (cu_seqlens.diff() + (factor - 1)) // factor * factor
    return torch.cat((cu_seqlens[:1], padded.cumsum(0, dtype=cu_seqlens.dtype)))
