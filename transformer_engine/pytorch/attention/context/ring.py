"""p2p: keys and values pass round a ring of ranks, and meet the queries of each.

In step i rank r has the keys of rank r - i, while those of rank r - i - 1 are on their way to it.
The backward goes round once more, and ends with the rank's own keys: the gradients of keys follow
one step behind, and come home under that last step. They pass in fp32 from three ranks on; of two,
each is a part's own and passes in the dtype that it has.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from transformer_engine.pytorch.attention.backends.backend import Backend, Gradients, Needs, Saved
from transformer_engine.pytorch.attention.context.lengths import UNIT
from transformer_engine.pytorch.attention.context.parts import Sums, Whole
from transformer_engine.pytorch.attention.context.spans import side_of_rank
from transformer_engine.pytorch.attention.context.visits import (
    Backward,
    Visit,
    attend,
    with_saved_tensors,
)
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.parallel.exchange import Coming, flat, pass_on, unflat


class _Ring:
    """A call on one rank of the ring."""

    def __init__(self, call: Call) -> None:
        context, shape = call.context, call.shape
        assert context is not None and context.group is not None
        self.group, self.rank, self.ranks = context.group, context.group_rank, context.group_size
        packed = shape.qkv_format == "thd"
        self.key_length = UNIT if packed else shape.keys // 2
        queries = side_of_rank(self.rank, self.ranks, UNIT if packed else shape.queries // 2)
        self.whole = Whole(call, self.ranks, queries, self.ranks, (shape.queries, shape.keys))

    def visits(self, key: torch.Tensor, value: torch.Tensor, own_last: bool) -> Iterator[Visit]:
        """Keys and values of all ranks; those of the next step come while this one runs."""
        here, shapes = flat(key, value), (key.shape, value.shape)
        for step in range(self.ranks):
            coming = pass_on(here, self.group) if step + 1 < self.ranks else None
            if step or not own_last:
                yield self._visit(step, *(unflat(here, *shapes) if step else (key, value)))
            if coming is not None:
                here = coming.wait()
        if own_last:
            yield self._visit(0, key, value)

    def _visit(self, step: int, key: torch.Tensor, value: torch.Tensor) -> Visit:
        owner = (self.rank - step) % self.ranks
        return Visit(step, side_of_rank(owner, self.ranks, self.key_length), key, value)

    def passed(self, sums: tuple[Sums, Sums], before: Coming | None) -> Coming:
        """Send gradients of keys on, with those that came from the ranks before."""
        if self.ranks == 2:
            return pass_on(flat(*[x.result() for x in sums]), self.group)
        mine = flat(*[x.exact() for x in sums])
        if before is not None:
            mine += before.wait()
        return pass_on(mine, self.group)


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, needs: Needs
) -> tuple[torch.Tensor, Saved | None]:
    """See `backends/__init__.py`."""
    ring = _Ring(call)
    visits = ring.visits(key, value, own_last=False)
    return attend(ring.whole, visits, (query, key, value), needs)


def backward(grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
    """See `backends/__init__.py`."""
    ring = _Ring(with_saved_tensors(call, saved))
    run = Backward(ring.whole, grad, saved, needs)
    _, key, value, _ = saved.tensors[:4]
    coming = None
    for visit in ring.visits(key, value, own_last=True):
        sums = run.visit(visit)
        if visit.number:
            coming = ring.passed(sums, coming)
    assert coming is not None, "a ring has two ranks or more"
    for mine, others in zip(sums, unflat(coming.wait(), key.shape, value.shape), strict=True):
        mine.add_all(others)
    return run.gradients(*[x.result() for x in sums])


BACKEND = Backend("p2p", forward, backward, keeps_scores=True, requirements=())
