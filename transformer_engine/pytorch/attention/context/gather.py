"""all_gather: every rank gets all keys and values, and sums their gradients with the others.

The backward gathers again: only a rank's own keys are kept in between.
"""

from __future__ import annotations

import torch

from transformer_engine.pytorch.attention.backends.backend import Backend, Gradients, Needs, Saved
from transformer_engine.pytorch.attention.context.lengths import UNIT
from transformer_engine.pytorch.attention.context.parts import Sums, Whole
from transformer_engine.pytorch.attention.context.spans import side_of_rank, whole_side
from transformer_engine.pytorch.attention.context.visits import (
    Backward,
    Visit,
    attend,
    with_saved_tensors,
)
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.attention.core.formats import sequence_dim
from transformer_engine.pytorch.parallel.exchange import gather_stack, sum_own
from transformer_engine.pytorch.parallel.order import by_rank, in_order


class _Gathering:
    """A call on one rank."""

    def __init__(self, call: Call) -> None:
        context, shape = call.context, call.shape
        assert context is not None and context.group is not None
        self.group, self.ranks = context.group, context.group_size
        self.dim = sequence_dim(shape.qkv_format)
        packed = shape.qkv_format == "thd"
        self.starts = call.key_sequences.starts if packed else None
        lengths = (UNIT, UNIT) if packed else (shape.queries // 2, shape.keys // 2)
        queries = side_of_rank(context.group_rank, self.ranks, lengths[0])
        self.side = whole_side(self.ranks, lengths[1])
        tokens = (shape.queries, shape.keys * self.ranks)
        self.whole = Whole(call, self.ranks, queries, 1, tokens)

    def visit(self, key: torch.Tensor, value: torch.Tensor) -> Visit:
        """All keys and values."""
        return Visit(0, self.side, self._gathered(key), self._gathered(value))

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        return in_order(gather_stack(x, self.group), self.dim, self.starts)

    def own(self, sums: Sums, like: torch.Tensor) -> torch.Tensor:
        """This rank's part of a gradient that all have added to, in fp32 until then."""
        stack = by_rank(sums.exact(), self.dim, self.ranks, self.starts)
        return sum_own(stack, self.group).to(like.dtype)


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, needs: Needs
) -> tuple[torch.Tensor, Saved | None]:
    """See `backends/__init__.py`."""
    gathering = _Gathering(call)
    visits = [gathering.visit(key, value)]
    return attend(gathering.whole, visits, (query, key, value), needs)


def backward(grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
    """See `backends/__init__.py`."""
    gathering = _Gathering(with_saved_tensors(call, saved))
    run = Backward(gathering.whole, grad, saved, needs)
    _, key, value, _ = saved.tensors[:4]
    sums = run.visit(gathering.visit(key, value))
    return run.gradients(*[gathering.own(x, key) for x in sums])


BACKEND = Backend("all_gather", forward, backward, keeps_scores=True, requirements=())
