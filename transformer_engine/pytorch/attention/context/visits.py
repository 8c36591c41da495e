"""Attention of a rank's queries with keys that come in visits: all parts, and the backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.attention.backends.backend import Backend, Gradients, Needs, Saved
from transformer_engine.pytorch.attention.context.parts import (
    Kept,
    Merged,
    Part,
    Sums,
    Whole,
    add_bias_gradient,
    back_part,
    run_part,
    sink_gradient,
)
from transformer_engine.pytorch.attention.context.spans import Side
from transformer_engine.pytorch.attention.core.call import TENSORS, Call, CallTensors


class Visit(NamedTuple):
    """Keys and values that are here together.

    Attributes:
        number: of the visit; forward and backward may differ in their order.
        side: the chunks that they are.
        key: in the format of the call.
        value: likewise.
    """

    number: int
    side: Side
    key: torch.Tensor
    value: torch.Tensor


class _Left(NamedTuple):
    """What the forward of a part leaves, but for tensors."""

    number: int
    backend: Backend
    facts: Any
    tensors: slice


def attend(
    whole: Whole, visits: Iterable[Visit], inputs: Sequence[torch.Tensor], needs: Needs
) -> tuple[torch.Tensor, Saved | None]:
    """See `backends/__init__.py`; `inputs` are query, key and value of this rank."""
    query, key, value = inputs
    call, merged = whole.call, Merged(whole, query)
    stream = None if call.context is None else call.context.stream
    tensors: list[Any] = []
    left: list[_Left] = []
    for visit in visits:
        for part in whole.parts(visit.side):
            out, rows, (backend, saved) = run_part(_inputs(whole, part, query, visit), part, needs)
            with _on(stream, out, rows):
                merged.add(part, out, rows)
            if any(needs):
                place = slice(len(tensors), len(tensors) + len(saved.tensors))
                left.append(_Left(visit.number, backend, saved.facts, place))
                tensors += saved.tensors
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
        merged.record_stream(torch.cuda.current_stream())
    out, rows = merged.result(call.sink.offset)
    if not any(needs):
        return out, None
    return out, Saved(rows, (query, key, value, out, *call.tensors, *tensors), left)


@contextmanager
def _on(stream: Any, *tensors: torch.Tensor) -> Iterator[None]:
    """Behind all that is under way, on a stream which reads these tensors, if there is one."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    for x in tensors:
        x.record_stream(stream)


def _inputs(
    whole: Whole, part: Part, query: torch.Tensor, visit: Visit
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    queries, keys = part.piece.queries, part.piece.keys
    return (
        whole.narrow(query, queries),
        whole.narrow(visit.key, keys),
        whole.narrow(visit.value, keys),
    )


def with_saved_tensors(call: Call, saved: Saved) -> Call:
    """The call whose backward reads what `attend` saved."""
    return call.with_tensors(CallTensors(*saved.tensors[4 : 4 + TENSORS]))


class Backward:
    """The backward of `attend`, visit by visit.

    Args:
        whole: as in the forward.
        grad: of the result.
        saved: by the forward.
        needs: which gradients are wanted.
    """

    def __init__(self, whole: Whole, grad: torch.Tensor, saved: Saved, needs: Needs) -> None:
        self.whole, self.grad, self.needs = whole, grad, needs
        self.query, _, _, self.out = saved.tensors[:4]
        rows = saved.log_sum_exp
        assert rows is not None
        self._saved_rows = rows
        self.rows = rows.masked_fill(rows == -torch.inf, torch.inf)
        self._tensors, self._left = saved.tensors[4 + TENSORS :], saved.facts
        self._query_sums = Sums(self.query)
        bias = whole.call.bias.tensor
        self._bias = None
        if needs.bias and bias is not None:
            self._bias = torch.zeros_like(bias, dtype=torch.float32)

    def visit(self, visit: Visit) -> tuple[Sums, Sums]:
        """Gradients of the keys and values of a visit."""
        whole, sums = self.whole, (Sums(visit.key), Sums(visit.value))
        left = iter([x for x in self._left if x.number == visit.number])
        for part, (_, backend, facts, place) in zip(whole.parts(visit.side), left, strict=True):
            queries, keys = part.piece.queries, part.piece.keys
            rest = Kept(backend, Saved(None, self._tensors[place], facts))
            grad, out, rows = (whole.narrow(x, queries) for x in (self.grad, self.out, self.rows))
            tensors = (*_inputs(whole, part, self.query, visit), out)
            found = back_part(grad, tensors, rows, part, rest, self.needs)
            self._query_sums.add(whole, queries, found.query)
            sums[0].add(whole, keys, found.key)
            sums[1].add(whole, keys, found.value)
            if self._bias is not None:
                add_bias_gradient(self._bias, found.bias, part)
        return sums

    def gradients(self, key: torch.Tensor, value: torch.Tensor) -> Gradients:
        """All of them, with those of keys and values of this rank."""
        call, needs = self.whole.call, self.needs
        sink = None
        if needs.sink and call.sink.offset is not None:
            size = call.shape.value_size
            sink = sink_gradient(call.sink.offset, self._saved_rows, self.grad, self.out, size)
        bias = self._bias
        if bias is not None and call.bias.tensor is not None:
            bias = bias.to(call.bias.tensor.dtype)
        return needs.pick(self._query_sums.result(), key, value, bias, sink)
