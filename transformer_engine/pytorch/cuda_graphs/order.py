"""The order in which the graphs of a pipeline are captured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


class CaptureOrder:
    """The order of captures; see `_order` of `make_graphed_callables`.

    Args:
        functions: the number of callables.
        order: the chunks in the order in which micro-batches run them, `c` for a forward and `-c`
            for a backward; None for one chunk and one micro-batch.
        sizes: the number of callables in each chunk; None for chunks of equal size.
    """

    def __init__(
        self, functions: int, order: Sequence[int] | None, sizes: Sequence[int] | None = None
    ) -> None:
        self.order = [1, -1] if order is None else list(order)
        chunks = max(self.order, default=0)
        self.batches = self.order.count(1)
        self.sizes = list(sizes or [functions // max(chunks, 1)] * chunks)
        self.firsts = [0, *accumulate(self.sizes)]  # the first callable of each chunk
        known = range(1, chunks + 1)
        paired = all(self.order.count(c) == self.order.count(-c) == self.batches for c in known)
        whole = len(self.sizes) == chunks and self.firsts[-1] == functions
        if not (chunks and paired and whole and self._runs()):
            raise ValueError(
                "[make_graphed_callables] expected _order to have a forward c before each backward "
                "-c, as many of each chunk 1, 2, ..., and chunks of equal size (or of those in "
                f"_num_layers_per_chunk), got {order} for {functions} callable(s)"
                + ("" if sizes is None else f" in chunks of {list(sizes)}")
            )

    def _runs(self) -> bool:
        """Whether no backward comes before its forward."""
        balance = dict.fromkeys(map(abs, self.order), 0)
        for c in self.order:
            balance[abs(c)] += 1 if c > 0 else -1
            if balance[abs(c)] < 0:
                return False
        return True

    def function(self, graph: int) -> int:
        """The callable of a graph. Graphs are numbered by chunk, micro-batch and callable."""
        chunk = max(c for c, first in enumerate(self.firsts[:-1]) if first * self.batches <= graph)
        first = self.firsts[chunk]
        return first + (graph - first * self.batches) % self.sizes[chunk]

    def steps(self) -> list[tuple[int, bool]]:
        """(graph, whether it is the forward's), in order."""
        done = dict.fromkeys((*self.order, *(-c for c in self.order)), 0)
        steps = []
        for c in self.order:
            size, before = self.sizes[abs(c) - 1], self.firsts[abs(c) - 1]
            first = before * self.batches + done[c] * size
            done[c] += 1
            layers = range(size) if c > 0 else range(size - 1, -1, -1)
            steps += [(first + layer, c > 0) for layer in layers]
        return steps
