"""a2a: ranks exchange heads for tokens; then each runs whole sequences with some of the heads.

With `a2a+p2p` a group of ranks exchanges heads, and ring attention runs between the groups: after
the exchange each rank has the tokens that one rank of the smaller ring has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.attention.backends.backend import Backend, Gradients, Needs, Saved
from transformer_engine.pytorch.attention.backends.choice import choose_inside
from transformer_engine.pytorch.attention.context import ring
from transformer_engine.pytorch.attention.context.lengths import check_packed
from transformer_engine.pytorch.attention.context.parts import with_seed
from transformer_engine.pytorch.attention.core.call import (
    NO_SINK,
    TENSORS,
    AttentionMask,
    Bias,
    Call,
    CallShape,
    CallTensors,
    Sink,
)
from transformer_engine.pytorch.attention.core.formats import sequence_dim
from transformer_engine.pytorch.attention.masks.alibi import default_slopes
from transformer_engine.pytorch.attention.masks.masks import build_mask
from transformer_engine.pytorch.capture import memoize
from transformer_engine.pytorch.parallel.collectives import Pending
from transformer_engine.pytorch.parallel.exchange import (
    all_gather_stack,
    all_to_all_stack,
    reduce_scatter_stack,
)
from transformer_engine.pytorch.parallel.order import to_rank_order, to_sequence_order


class _Facts(NamedTuple):
    """What the backward needs beside tensors.

    Attributes:
        backend: the backend that ran after the exchange.
        backend_facts: `Saved.facts` of that backend.
        inner: settings of the call that the backend ran.
    """

    backend: Backend
    backend_facts: Any
    inner: Call


class _Exchange:
    """A call on one of the ranks that exchange heads for tokens.

    With `sends=False` nothing is sent: this rank's own mask and bias stand in for those of others.
    """

    def __init__(self, call: Call, sends: bool = True) -> None:
        context = call.context
        assert context is not None and context.heads is not None
        self.call, self.context, self.group = call, context, context.heads
        self.ranks, self.rank = context.head_size, context.head_rank
        self.dim = sequence_dim(call.shape.qkv_format)
        self._sends = sends

    def _starts(self, side: str) -> torch.Tensor | None:
        if self.call.shape.qkv_format != "thd":
            return None
        sequences = self.call.query_sequences if side == "query" else self.call.key_sequences
        assert sequences.starts is not None
        return sequences.starts // self.context.group_size

    def to_heads(self, x: torch.Tensor, side: str) -> Pending:
        """Send `[tokens of this rank, heads, size]`, receive `[tokens of all, some heads, size]`.

        `side` is `query` or `key`: the sequences that the tokens belong to.
        """
        stack = x.unflatten(-2, (self.ranks, -1)).movedim(-3, 0)
        received = all_to_all_stack(stack, self.group)
        return received.then(lambda x: to_sequence_order(x, self.dim, self._starts(side)))

    def to_tokens(self, x: torch.Tensor | None, side: str) -> Pending:
        """The inverse of `to_heads`; None becomes None."""
        if x is None:
            return Pending(None)
        stack = to_rank_order(x, self.dim, self.ranks, self._starts(side))
        received = all_to_all_stack(stack, self.group)
        return received.then(lambda x: x.movedim(0, -3).flatten(-3, -2))

    def inner(self, device: torch.device) -> Call:
        """The call after the exchange: fewer heads, more tokens."""
        call, context = self.call, self.context
        return call._replace(
            shape=_inner_shape(call.shape, self.ranks, context.group is not None),
            attention_mask=self._mask(call.attention_mask),
            bias=self._bias(device),
            sink=self._sink(),
            context=None if context.group is None else context.without_heads(),
            checkpoint=False,
        )

    def _share(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's heads of a tensor; all of it where a size of 1 stands for all heads."""
        return x if x.shape[dim] == 1 else x.chunk(self.ranks, dim)[self.rank]

    def _stack(self, x: torch.Tensor) -> torch.Tensor:
        if self._sends:
            return all_gather_stack(x, self.group)
        return x.expand(self.ranks, *x.shape)

    def _all_queries(self, x: torch.Tensor) -> torch.Tensor:
        """Gather `[..., queries of this rank, keys]` to `[..., queries of all ranks, keys]`."""
        if x.dim() < 2 or x.shape[-2] == 1:
            return x
        stack = self._stack(x.movedim(-2, 0))
        return to_sequence_order(stack, 0).movedim(0, -2)

    def _all_tokens(self, mask: torch.Tensor) -> torch.Tensor:
        """Gather a padding mask `[batch, 1, 1, tokens]` from all ranks."""
        stack = self._stack(mask.movedim(-1, 0))
        return to_sequence_order(stack, 0).movedim(0, -1)

    def _mask(self, mask: AttentionMask | None) -> AttentionMask | None:
        kind = self.call.shape.rule.type
        if kind.arbitrary and isinstance(mask, torch.Tensor):
            mask = self._all_queries(mask)
            return self._share(mask, -3) if mask.dim() > 2 else mask
        if not kind.padding or mask is None:
            return None
        if isinstance(mask, torch.Tensor):
            return self._all_tokens(mask)
        return self._all_tokens(mask[0]), self._all_tokens(mask[1])

    def _bias(self, device: torch.device) -> Bias:
        bias = self.call.bias
        if bias.type == "alibi":
            slopes = bias.slopes
            if slopes is None:
                slopes = default_slopes(self.call.shape.heads, device).flatten()
            return bias._replace(slopes=self._share(slopes, -1).contiguous())
        if bias.tensor is None:
            return bias
        return bias._replace(tensor=self._share(self._all_queries(bias.tensor), 1))

    def bias_gradient(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of the bias for the queries of this rank and all heads."""
        whole = self.call.bias.tensor
        if grad is None or whole is None:
            return None
        if whole.shape[1] > 1:
            all_heads = grad.new_zeros((grad.shape[0], whole.shape[1], *grad.shape[2:]))
            self._share(all_heads, 1).copy_(grad)
            grad = all_heads
        if whole.shape[2] == 1:
            raise AssertionError("`refusal` takes no learned bias that all queries share")
        stack = to_rank_order(grad.movedim(-2, 0), 0, self.ranks)
        return reduce_scatter_stack(stack, self.group).movedim(0, -2)

    def _sink(self) -> Sink:
        sink = self.call.sink
        if sink.offset is None:
            return NO_SINK
        return Sink(sink.type, self._share(sink.offset, 0))

    def sink_gradient(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of the sink: of this rank's heads, zero for the others."""
        offset = self.call.sink.offset
        if grad is None or offset is None:
            return None
        all_heads = torch.zeros_like(offset)
        self._share(all_heads, 0).copy_(grad)
        return all_heads


@memoize
def _inner_shape(shape: CallShape, ranks: int, in_ring: bool) -> CallShape:
    queries, keys = shape.queries * ranks, shape.keys * ranks
    plain = not (shape.rule.type.padding or shape.rule.type.arbitrary or in_ring)
    band = build_mask(shape.rule, queries, keys) if plain else None
    heads, groups = shape.heads // ranks, shape.groups // ranks
    return replace(shape, band=band, heads=heads, groups=groups, queries=queries, keys=keys)


def call_after_exchange(call: Call, device: torch.device) -> Call:
    """The call that the forward will run after the exchange; nothing is sent.

    Only the shapes of its mask and bias are right.
    """
    return _Exchange(call, sends=False).inner(device)


def exchanged(
    query: torch.Tensor, key: torch.Tensor, call: Call
) -> tuple[torch.Tensor, torch.Tensor, Call]:
    """Query, key and call after the exchange, which sends them."""
    exchange = _Exchange(call)
    started = exchange.to_heads(query, "query"), exchange.to_heads(key, "key")
    return started[0].wait(), started[1].wait(), exchange.inner(query.device)


def _check_lengths(call: Call) -> None:
    """Check the lengths before any exchange. All ranks have the same ones, so all raise errors."""
    context, shape = call.context, call.shape
    assert context is not None
    if shape.qkv_format == "thd":
        for name, sequences, tokens in (
            ("cu_seqlens_q", call.query_sequences, shape.queries),
            ("cu_seqlens_kv", call.key_sequences, shape.keys),
        ):
            check_packed(sequences, name, context.size, tokens * context.size)


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, needs: Needs
) -> tuple[torch.Tensor, Saved | None]:
    """See `backends/__init__.py`."""
    _check_lengths(call)
    exchange = _Exchange(call)
    inner = exchange.inner(query.device)
    started = [  # one tensor is being sent while the next one is reordered
        exchange.to_heads(query, "query"),
        exchange.to_heads(key, "key"),
        exchange.to_heads(value, "key"),
    ]
    inputs = [pending.wait() for pending in started]
    backend = ring.BACKEND
    if inner.context is None:
        backend = choose_inside(query.device, query.dtype, needs, inner)
        inner = with_seed(inner, backend, query.device)
    out, saved = backend.forward(inputs[0], inputs[1], inputs[2], inner, needs)
    size = call.shape.value_size
    out = exchange.to_tokens(out.unflatten(-1, (-1, size)), "query").wait().flatten(-2)
    if saved is None:
        return out, None
    facts = _Facts(backend, saved.facts, inner.settings())
    return out, Saved(saved.log_sum_exp, (*call.tensors, *saved.tensors), facts)


def backward(grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
    """See `backends/__init__.py`."""
    call = call.with_tensors(CallTensors(*saved.tensors[:TENSORS]))
    exchange, (backend, backend_facts, inner) = _Exchange(call), saved.facts
    grad = grad.unflatten(-1, (-1, call.shape.value_size))
    grad = exchange.to_heads(grad, "query").wait().flatten(-2)
    inner_saved = Saved(saved.log_sum_exp, saved.tensors[TENSORS:], backend_facts)
    query, key, value, bias, sink = backend.backward(grad, inner_saved, inner, needs)
    started = [
        exchange.to_tokens(query, "query"),
        exchange.to_tokens(key, "key"),
        exchange.to_tokens(value, "key"),
    ]
    query, key, value = (pending.wait() for pending in started)
    return Gradients(query, key, value, exchange.bias_gradient(bias), exchange.sink_gradient(sink))


BACKEND = Backend("a2a", forward, backward, keeps_scores=True, requirements=())
