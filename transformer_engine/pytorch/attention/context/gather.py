"""all_gather: every rank gathers all keys and values; their gradients are reduce-scattered.

Between forward and backward a rank saves only its own keys and values; the backward gathers those
of all ranks again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from transformer_engine.pytorch.attention.backends.backend import Backend, Gradients, Needs, Saved
from transformer_engine.pytorch.attention.context.attend import (
    Backward,
    KeyValues,
    attend,
    with_saved_tensors,
)
from transformer_engine.pytorch.attention.context.codes import with_casts
from transformer_engine.pytorch.attention.context.lengths import UNIT
from transformer_engine.pytorch.attention.context.merging import GradSum
from transformer_engine.pytorch.attention.context.parts import AttentionPart, RankCall
from transformer_engine.pytorch.attention.context.score_blocks import chunks_of_all, chunks_of_rank
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.attention.core.formats import sequence_dim
from transformer_engine.pytorch.parallel.exchange import all_gather_stack, reduce_scatter_stack
from transformer_engine.pytorch.parallel.order import to_rank_order, to_sequence_order


class _GatherCall:
    """A call on one rank of the group."""

    def __init__(self, call: Call, device: torch.device) -> None:
        context, shape = call.context, call.shape
        assert context is not None and context.group is not None
        self.group, self.ranks = context.group, context.group_size
        self.dim = sequence_dim(shape.qkv_format)
        packed = shape.qkv_format == "thd"
        self.starts = call.key_sequences.starts if packed else None
        lengths = (UNIT, UNIT) if packed else (shape.queries // 2, shape.keys // 2)
        queries = chunks_of_rank(context.group_rank, self.ranks, lengths[0])
        self.key_chunks = chunks_of_all(self.ranks, lengths[1])
        tokens = (shape.queries, shape.keys * self.ranks)
        self.rank_call = RankCall(call, self.ranks, queries, 1, tokens, device)

    def all_keys(self, key: torch.Tensor, value: torch.Tensor) -> KeyValues:
        """The keys and values of all ranks: the only step."""
        return KeyValues(0, self.key_chunks, self.gathered(key), self.gathered(value))

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """The keys, or values, of all ranks."""
        return to_sequence_order(all_gather_stack(x, self.group), self.dim, self.starts)

    def reduce_scatter(self, grad: GradSum) -> torch.Tensor:
        """Sum a gradient of all tokens over the ranks, in fp32; returns this rank's tokens."""
        stack = to_rank_order(grad.in_fp32(), self.dim, self.ranks, self.starts)
        return reduce_scatter_stack(stack, self.group).to(grad.dtype)


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, needs: Needs
) -> tuple[torch.Tensor, Saved | None]:
    """See `backends/__init__.py`."""
    gather = _GatherCall(call, query.device)
    return attend(gather.rank_call, [gather.all_keys(key, value)], (query, key, value), needs)


def backward(grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
    """See `backends/__init__.py`."""
    gather = _GatherCall(with_saved_tensors(call, saved), grad.device)
    steps = Backward(gather.rank_call, grad, saved, needs)
    _, key, value, _ = saved.tensors[:4]
    grads = steps.run(gather.all_keys(key, value))
    return steps.gradients(*[gather.reduce_scatter(x) for x in grads])


def parts(query: torch.Tensor, call: Call) -> Iterator[AttentionPart]:
    """The parts that the forward will run; nothing is sent."""
    gather = _GatherCall(call, query.device)
    return gather.rank_call.parts(gather.key_chunks)


def parts_with_keys(
    query: torch.Tensor, key: torch.Tensor, call: Call
) -> Iterator[tuple[torch.Tensor, torch.Tensor, Call]]:
    """Queries, keys and call of each part; keys are gathered first, whatever `cp_comm_type` is."""
    gather = _GatherCall(call, query.device)
    own, keys = gather.rank_call, gather.gathered(key)
    for part in own.parts(gather.key_chunks):
        yield own.narrow(query, part.block.queries), own.narrow(keys, part.block.keys), part.call


BACKEND = Backend("all_gather", *with_casts(forward, backward), keeps_scores=True, requirements=())
