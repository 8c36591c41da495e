"""`apply_fused_qkv_rotary_pos_emb`: the rotation of queries and keys of a packed projection."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transformer_engine.pytorch.attention.rope.embedding import apply_rotary_pos_emb
from transformer_engine.pytorch.module.arguments import list_of_ints
from transformer_engine.pytorch.module.inputs import check_tensors

_OP = "apply_fused_qkv_rotary_pos_emb"


def apply_fused_qkv_rotary_pos_emb(
    qkv: torch.Tensor,
    q_freqs: torch.Tensor,
    k_freqs: torch.Tensor,
    qkv_split_arg_list: Sequence[int],
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take queries, keys and values of a packed tensor apart, and rotate queries and keys.

    Args:
        qkv: `[sequence, batch, groups, elements]`, or as `tensor_format` says: for each group of
            heads its queries, then its key, then its value.
        q_freqs: angles of queries; for these and the following arguments see
            `apply_rotary_pos_emb`, which is called with `fused=True`.
        k_freqs: angles of keys.
        qkv_split_arg_list: how many elements of a group are queries, key and value; those of the
            queries are a multiple of those of the key, which are the size of a head.
        tensor_format: `sbhd`, `bshd` or `thd`.
        start_positions: int32 `[batch]`.
        interleaved: which elements are pairs.
        cu_seqlens: int32 `[batch + 1]`, for `thd`.
        cp_size: number of context parallel ranks.
        cp_rank: number of this rank.

    Returns:
        `(query, key, value)`: query `[sequence, batch, heads, size]`, key `[sequence, batch,
        groups, size]`, and value, a view, `[sequence, batch, groups, size of a value]`.

    Raises:
        ValueError: numbers of elements that do not fit, and as `apply_rotary_pos_emb`.
        TypeError: as `apply_rotary_pos_emb`; numbers of elements that are not ints.

    >>> from transformer_engine.pytorch.attention import RotaryPositionEmbedding
    >>> angles = RotaryPositionEmbedding(8)(5)
    >>> qkv = torch.randn(5, 2, 3, 4 * 8 + 8 + 8)
    >>> [x.shape[2:] for x in apply_fused_qkv_rotary_pos_emb(qkv, angles, angles, [32, 8, 8])]
    [torch.Size([12, 8]), torch.Size([3, 8]), torch.Size([3, 8])]
    """
    check_tensors(_OP, qkv=qkv)
    sizes = list_of_ints(_OP, None, qkv_split_arg_list=qkv_split_arg_list)
    if len(sizes) != 3 or min(sizes) < 1 or sizes[0] % sizes[1]:
        raise ValueError(
            f"[{_OP}] expected qkv_split_arg_list of three sizes of 1 or more, the first a multiple"
            f" of the second, got {sizes}"
        )
    if qkv.dim() < 2 or qkv.shape[-1] != sum(sizes):
        raise ValueError(
            f"[{_OP}] expected qkv of {sum(sizes)} elements in the last dimension, the sum of"
            f" qkv_split_arg_list, got {tuple(qkv.shape)}"
        )
    query, key, value = qkv.split(sizes, dim=-1)
    heads = query.unflatten(-1, (-1, sizes[1])).flatten(-3, -2)

    def rotated(t: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb(
            t,
            freqs,
            tensor_format,
            fused=True,
            cu_seqlens=cu_seqlens,
            start_positions=start_positions,
            interleaved=interleaved,
            cp_size=cp_size,
            cp_rank=cp_rank,
        )

    return rotated(heads, q_freqs), rotated(key, k_freqs), value
