"""What `set_context_parallel_group` sets: checks of its arguments, and copies of modules."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.pytorch.attention.context.group import ContextGroup
from transformer_engine.pytorch.attention.context.schemes import scheme
from transformer_engine.pytorch.attention.core.call import check_comm_type
from transformer_engine.pytorch.parallel.groups import check_group


class SharesContext:
    """Base of modules with ranks that share sequences; copies have the same ranks."""

    context: ContextGroup | None
    cp_group: Any
    cp_stream: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        for shared in (self.context, self.cp_group, self.cp_stream):  # these cannot be copied
            memo[id(shared)] = shared
        copied: Any = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # type: ignore[attr-defined]
        return copied


def context_group(
    layer: str,
    heads: tuple[int, int],
    cp_group: Any,
    cp_global_ranks: Any,
    cp_stream: Any,
    cp_comm_type: str,
) -> ContextGroup | None:
    """The ranks that the arguments of `set_context_parallel_group` name; None for one rank.

    `heads` are the numbers of query heads and of key heads. The stream is checked, but not used.
    """
    where = f" (layer {layer})"
    check_comm_type(cp_comm_type, where)
    groups = [*cp_group] if isinstance(cp_group, list | tuple) else [cp_group]
    if len(groups) != 1 + (cp_comm_type == "a2a+p2p") and cp_group is not None:
        expected = (
            "a list of two process groups, of those that exchange heads and of the ring,"
            if cp_comm_type == "a2a+p2p"
            else "one process group"
        )
        raise ValueError(
            f"[DotProductAttention] expected cp_group to be {expected} with"
            f" cp_comm_type={cp_comm_type!r}, got {len(groups)}{where}"
        )
    for group in groups:
        _check_member(layer, group)
    _check_stream(cp_stream, where)
    if cp_global_ranks is not None and not isinstance(cp_global_ranks, Iterable):
        raise TypeError(
            "[DotProductAttention] expected cp_global_ranks to be a list of ranks or None, got"
            f" {cp_global_ranks!r}{where}"
        )
    if cp_group is None or not dist.is_initialized():
        return None
    _check_ranks(groups, cp_global_ranks, where)
    sizes = [dist.get_world_size(group) for group in groups]
    if max(sizes) == 1:
        return None
    several = [group if size > 1 else None for group, size in zip(groups, sizes, strict=True)]
    if cp_comm_type == "a2a":
        several = [*several, None]
    elif cp_comm_type != "a2a+p2p":
        several = [None, *several]
    context = ContextGroup(cp_comm_type, several[1], several[0], scheme)
    _check_heads(context, heads, where)
    return context


def _check_member(layer: str, group: Any) -> None:
    check_group("DotProductAttention", "cp_group", group, layer)
    if group is not None and dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "[DotProductAttention] expected cp_group to have this rank as a member, got a group of"
            f" others (layer {layer})"
        )


def _check_stream(stream: Any, where: str) -> None:
    if stream is None:
        return
    if not torch.cuda.is_available():
        raise ValueError(
            f"[DotProductAttention] expected cp_stream=None where there is no GPU, got {stream!r}"
            f"{where}"
        )
    if not isinstance(stream, torch.cuda.Stream):
        raise TypeError(
            f"[DotProductAttention] expected cp_stream to be a torch.cuda.Stream or None, got"
            f" {stream!r}{where}"
        )


def _check_ranks(groups: Sequence[Any], ranks: Any, where: str) -> None:
    if ranks is None:
        return
    found = [*ranks]
    members = dist.get_process_group_ranks(groups[0])
    fits = found == members if len(groups) == 1 else set(members) <= set(found)
    if not fits:
        raise ValueError(
            f"[DotProductAttention] expected cp_global_ranks {members}, the ranks of cp_group, got"
            f" {found}{where}"
        )


def _check_heads(context: ContextGroup, heads: tuple[int, int], where: str) -> None:
    """Raise ValueError unless the heads can be divided equally among the ranks."""
    size = context.head_size
    if heads[0] % size or heads[1] % size:
        raise ValueError(
            f"[DotProductAttention] expected num_attention_heads and num_gqa_groups divisible by"
            f" {size} (the ranks that exchange heads) with cp_comm_type={context.comm_type!r}, got"
            f" {heads[0]} and {heads[1]}; use 'p2p' or 'all_gather'{where}"
        )
