"""`ContextGroup`: the ranks that share sequences, and which calls they can serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.capture import is_capturing
from transformer_engine.pytorch.parallel.meeting import ranks_of


@dataclass(frozen=True, eq=False)
class ContextGroup:
    """The ranks that share sequences.

    Attributes:
        comm_type: one of `call.COMM_TYPES`.
        group: process group of the ring, or of the ranks that gather keys; None for `a2a`.
        heads: process group of the ranks that exchange heads for tokens; None for `p2p` and
            `all_gather`.
        backend_for: `schemes.scheme`, which chooses the backend of a call.
        known: the structures of calls on which the ranks have agreed, see `schemes.scheme`.
    """

    comm_type: str
    group: dist.ProcessGroup | None
    heads: dist.ProcessGroup | None = None
    backend_for: Callable[[torch.Tensor, tuple[bool, ...], Call], Any] | None = None
    known: set[Any] = field(default_factory=set)

    @property
    def group_size(self) -> int:
        """The number of ranks in `group`; 1 without a group."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def group_rank(self) -> int:
        """The number of this rank in `group`."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def head_size(self) -> int:
        """The number of ranks in `heads`; 1 without a group."""
        return 1 if self.heads is None else dist.get_world_size(self.heads)

    @property
    def head_rank(self) -> int:
        """The number of this rank in `heads`."""
        return 0 if self.heads is None else dist.get_rank(self.heads)

    @property
    def size(self) -> int:
        """The number of ranks that share a sequence."""
        return self.group_size * self.head_size

    @property
    def rank(self) -> int:
        """This rank's number among all that share a sequence.

        The rank has the chunks `rank` and `2 * size - 1 - rank`.
        """
        return self.group_rank * self.head_size + self.head_rank

    def without_heads(self) -> ContextGroup:
        """The ring of this group, without the exchange of heads."""
        return replace(self, comm_type="p2p", heads=None)


class Refusal(NamedTuple):
    """Why context parallel ranks cannot run a call: the three parts of an error message."""

    expected: str
    got: str
    advice: str

    def text(self, comm_type: str) -> str:
        """The error message."""
        return (
            f"[DotProductAttention] expected {self.expected} with cp_comm_type={comm_type!r}, got"
            f" {self.got}; {self.advice}"
        )


def refusal(call: Call) -> Refusal | None:
    """Why context parallel ranks cannot run a call; None if they can."""
    context, shape = call.context, call.shape
    assert context is not None
    if call.cache:
        return Refusal("no inference_params", "a cache", "generate without a cp_group")
    if shape.qkv_format != "thd":
        for name, tokens in (("query", shape.queries), ("key", shape.keys)):
            if tokens % 2:
                return Refusal(
                    f"two chunks of equal length in {name}_layer of each rank",
                    f"{tokens} tokens",
                    f"pad sequences to a multiple of {2 * context.size}",
                )
    elif call.bias.tensor is not None:
        expected = "no core_attention_bias of packed sequences"
        return Refusal(expected, "one", "use the format bshd or sbhd")
    if context.group is None:
        return _refusal_of_heads(call)
    if not _scales_are_equal(call):
        expected = "a recipe with reduce_amax and an fp8_group with all ranks of cp_group"
        return Refusal(expected, "attention in FP8 without them", "or use 'a2a'")
    if call.bias.type == "alibi":
        return Refusal("no ALiBi", "core_attention_bias_type='alibi'", "use 'a2a'")
    if shape.rule.type.padding and (
        call.query_sequences.cu_seqlens is None or call.key_sequences.cu_seqlens is None
    ):
        return Refusal("cu_seqlens_q and cu_seqlens_kv", "a mask of padding", "or use 'a2a'")
    if context.heads is not None and (shape.rule.type.arbitrary or call.bias.tensor is not None):
        expected = "no arbitrary attention_mask and no core_attention_bias"
        return Refusal(expected, "one", "use 'p2p', 'all_gather' or 'a2a'")
    return _refusal_of_window(call) or refusal_of_lengths(call) or _refusal_of_shapes(call)


def _scales_are_equal(call: Call) -> bool:
    """Whether all ranks use the same scales, so that they can read each other's FP8 codes."""
    casts, context = call.casts, call.context
    if casts is None or casts.calibrating:
        return True
    assert context is not None and context.group is not None
    reduces, group = casts.reduction
    if not reduces or group is dist.GroupMember.NON_GROUP_MEMBER:
        return False
    return {*ranks_of(context.group)} <= {*ranks_of(group)}


def _refusal_of_window(call: Call) -> Refusal | None:
    """Refuse windows of padded sequences, if their place would depend on the lengths."""
    assert call.context is not None
    rule = call.shape.rule
    windowed = rule.left >= 0 or (rule.right >= 0 and not rule.type.causal)
    if not (rule.type.padding and windowed):
        return None
    window = f"{(rule.left, rule.right)}"
    if call.context.comm_type != "all_gather":
        advice = "use 'a2a', or 'all_gather' for causal ones"
        return Refusal("no window of padded sequences", window, advice)
    if not rule.type.causal:
        return Refusal("a causal window of padded sequences", window, "use 'a2a'")
    return None


def refusal_of_lengths(call: Call) -> Refusal | None:
    """Refuse a causal mask if padded sequences have more keys than queries, or fewer.

    Lengths are no part of the structure on which ranks agree, so this is checked in every call.
    They are read only if queries and keys have separate tensors of lengths: the host waits for a
    GPU then, which is impossible while a CUDA graph is captured.
    """
    assert call.context is not None
    kind = call.shape.rule.type
    moves = call.context.group is not None and kind.padding and kind.causal
    if not moves or is_capturing() or _alike(call):
        return None
    expected = "queries and keys of the same lengths, with padding and a causal mask"
    return Refusal(expected, "others", "use 'a2a'")


def _alike(call: Call) -> bool:
    pairs = zip(call.query_sequences[:2], call.key_sequences[:2], strict=True)
    return call.shape.queries == call.shape.keys and all(
        a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs
    )


def _refusal_of_shapes(call: Call) -> Refusal | None:
    """Refuse masks and biases that do not have this rank's queries and the keys of all ranks."""
    assert call.context is not None
    mask = call.attention_mask if call.shape.rule.type.arbitrary else None
    whole = (call.shape.queries, call.shape.keys * call.context.size)
    for name, x in (("attention_mask", mask), ("core_attention_bias", call.bias.tensor)):
        if not isinstance(x, torch.Tensor):
            continue
        sizes = (1, 1, *x.shape)[-2:]
        if any(size not in (1, full) for size, full in zip(sizes, whole, strict=True)):
            return Refusal(
                f"{name} of {whole[0]} queries (of this rank) and {whole[1]} keys (of all ranks)",
                f"{tuple(x.shape)}",
                "shard its queries with shard_sequence",
            )
    return None


def _refusal_of_heads(call: Call) -> Refusal | None:
    bias = call.bias.tensor
    if bias is not None and bias.requires_grad and bias.shape[-2] == 1:
        expected = "a learned core_attention_bias with a row for each query"
        return Refusal(expected, f"{tuple(bias.shape)}", "use 'p2p'")
    return _refusal_of_shapes(call)
