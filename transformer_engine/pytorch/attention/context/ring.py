"""p2p: keys and values pass round a ring of ranks, and meet the queries of each.

In step i of the forward rank r has the keys of rank r - i, while those of rank r - i - 1 are on
their way to it. It keeps what it has in the last step: the backward begins with that, goes round
the other way, and ends with its own keys. The gradients of keys follow one step behind, and come
home under that last step. They pass in fp32 from three ranks on; of two, each is a part's own and
passes in the dtype that it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
from transformer_engine.pytorch.parallel.exchange import Coming, pass_on


class _Ring:
    """A call on one rank of the ring.

    Attributes:
        last: keys and values of the last step of the forward.
    """

    last: Sequence[torch.Tensor] = ()

    def __init__(self, call: Call) -> None:
        context, shape = call.context, call.shape
        assert context is not None and context.group is not None
        self.group, self.rank, self.ranks = context.group, context.group_rank, context.group_size
        packed = shape.qkv_format == "thd"
        self.key_length = UNIT if packed else shape.keys // 2
        queries = side_of_rank(self.rank, self.ranks, UNIT if packed else shape.queries // 2)
        self.whole = Whole(call, self.ranks, queries, self.ranks, (shape.queries, shape.keys))

    def visits(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[Visit]:
        """Keys and values of all ranks; those of the next step come while this one runs."""
        here: Sequence[torch.Tensor] = (key, value)
        for step in range(self.ranks):
            coming = pass_on(here, self.group) if step + 1 < self.ranks else None
            yield self.visit(step, *here)
            if coming is not None:
                self.last = here = coming.wait()

    def visits_back(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[Visit]:
        """The same from the last step to the first but one, of what the last had."""
        here: Sequence[torch.Tensor] = (key, value)
        for step in range(self.ranks - 1, 0, -1):
            coming = pass_on(here, self.group, back=True) if step > 1 else None
            yield self.visit(step, *here)
            if coming is not None:
                here = coming.wait()

    def visit(self, step: int, key: torch.Tensor, value: torch.Tensor) -> Visit:
        owner = (self.rank - step) % self.ranks
        return Visit(step, side_of_rank(owner, self.ranks, self.key_length), key, value)

    def passed(self, sums: tuple[Sums, Sums], before: Coming | None) -> Coming:
        """Send gradients of keys on, with those that came from the ranks before."""
        if self.ranks == 2:
            return pass_on([x.result() for x in sums], self.group, back=True)
        mine = [x.exact() for x in sums]
        if before is not None:
            mine = [x.add_(other) for x, other in zip(mine, before.wait(), strict=True)]
        return pass_on(mine, self.group, back=True)


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, needs: Needs
) -> tuple[torch.Tensor, Saved | None]:
    """See `backends/__init__.py`."""
    ring = _Ring(call)
    out, saved = attend(ring.whole, ring.visits(key, value), (query, key, value), needs)
    if saved is None:
        return out, None
    return out, saved._replace(tensors=(*saved.tensors, *ring.last))


def backward(grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
    """See `backends/__init__.py`."""
    ring = _Ring(with_saved_tensors(call, saved))
    run = Backward(ring.whole, grad, saved, needs)
    coming = None
    for visit in ring.visits_back(*saved.tensors[-2:]):
        coming = ring.passed(run.visit(visit), coming)
    assert coming is not None, "a ring has two ranks or more"
    sums = run.visit(ring.visit(0, *saved.tensors[1:3]))
    for mine, other in zip(sums, coming.wait(), strict=True):
        mine.add_all(other)
    return run.gradients(*[x.result() for x in sums])


BACKEND = Backend("p2p", forward, backward, keeps_scores=True, requirements=())
