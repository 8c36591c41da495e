"""`ContextGroup`: the ranks that share sequences, and which calls they can serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.pytorch.attention.core.call import Call

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


@dataclass(frozen=True, eq=False)
class ContextGroup:
    """The ranks that share sequences.

    Attributes:
        comm_type: one of `COMM_TYPES`.
        group: of the ring, or of the ranks that gather; None for `a2a`.
        heads: of the ranks that exchange heads for tokens; None where none do.
        stream: on which every other part runs; None for the current stream.
        backend_for: of a call with this group, see `schemes.py`.
        known: structures of calls that all ranks have been found to share.
    """

    comm_type: str
    group: dist.ProcessGroup | None
    heads: dist.ProcessGroup | None = None
    stream: Any = None
    backend_for: Callable[[torch.dtype, tuple[bool, ...], Call], Any] | None = None
    known: set[Any] = field(default_factory=set)

    @property
    def group_size(self) -> int:
        """Ranks of `group`; 1 without."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def group_rank(self) -> int:
        """This rank in `group`."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def head_size(self) -> int:
        """Ranks of `heads`; 1 without."""
        return 1 if self.heads is None else dist.get_world_size(self.heads)

    @property
    def head_rank(self) -> int:
        """This rank in `heads`."""
        return 0 if self.heads is None else dist.get_rank(self.heads)

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return self.group_size * self.head_size

    @property
    def rank(self) -> int:
        """This rank among them: it has the chunks `rank` and `2 * size - 1 - rank`."""
        return self.group_rank * self.head_size + self.head_rank

    def without_heads(self) -> ContextGroup:
        """The ring alone."""
        return replace(self, comm_type="p2p", heads=None)


def refusal(call: Call) -> str | None:
    """Why ranks cannot serve a call together; None where they can."""
    context, shape = call.context, call.shape
    assert context is not None
    if call.casts is not None:
        return "attention in 16 bit or fp32; use a recipe without fp8_dpa and fp8_mha"
    if call.cache:
        return "no inference_params; generate without a context parallel group"
    if shape.qkv_format != "thd":
        for name, tokens in (("query", shape.queries), ("key", shape.keys)):
            if tokens % 2:
                return (
                    f"{name} tokens of a rank to be two chunks of equal length (sequences divisible"
                    f" by {2 * context.size}), got {tokens} tokens"
                )
    if context.group is None:
        return _refusal_of_heads(call)
    if call.bias.type == "alibi":
        return "no ALiBi with this cp_comm_type; use 'a2a'"
    kind = shape.rule.type
    if kind.padding and None in (call.query_sequences.cu_seqlens, call.key_sequences.cu_seqlens):
        return "padding as cu_seqlens_q and cu_seqlens_kv, or cp_comm_type 'a2a' with masks"
    if context.heads is not None and (kind.arbitrary or call.bias.tensor is not None):
        return "no mask or bias of one's own with this cp_comm_type; use 'p2p', 'all_gather', 'a2a'"
    return _refusal_of_band(call) or _refusal_of_shapes(call)


def _refusal_of_band(call: Call) -> str | None:
    """Padding ends sequences at lengths of their own, which a band does not follow everywhere."""
    assert call.context is not None
    rule = call.shape.rule
    windowed = rule.left >= 0 or (rule.right >= 0 and not rule.type.causal)
    if not rule.type.padding or not (windowed or rule.type.causal):
        return None
    if windowed and call.context.comm_type != "all_gather":
        return "no window with padding with this cp_comm_type; use 'all_gather' or 'a2a'"
    if windowed and not rule.type.causal:
        return "no window with padding unless it is causal with this cp_comm_type; use 'a2a'"
    if not _alike(call):
        return "queries and keys of the same lengths with causal padding; use 'a2a' for others"
    return None


def _alike(call: Call) -> bool:
    pairs = zip(call.query_sequences[:2], call.key_sequences[:2], strict=True)
    return call.shape.queries == call.shape.keys and all(
        a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs
    )


def _refusal_of_shapes(call: Call) -> str | None:
    """Masks and biases have the queries of a rank, and the keys of all."""
    assert call.context is not None
    mask = call.attention_mask if call.shape.rule.type.arbitrary else None
    whole = (call.shape.queries, call.shape.keys * call.context.size)
    for name, x in (("attention_mask", mask), ("core_attention_bias", call.bias.tensor)):
        if not isinstance(x, torch.Tensor):
            continue
        sizes = ((1, 1, *x.shape))[-2:]
        if any(size not in (1, full) for size, full in zip(sizes, whole, strict=True)):
            return (
                f"{name} of {whole[0]} queries (those of this rank) and {whole[1]} keys (of all"
                f" ranks), got {tuple(x.shape)}"
            )
    return None


def _refusal_of_heads(call: Call) -> str | None:
    bias = call.bias.tensor
    if bias is not None and bias.requires_grad and bias.shape[-2] == 1:
        return "a bias of all queries, if it is learned, with cp_comm_type='a2a'"
    return _refusal_of_shapes(call)
