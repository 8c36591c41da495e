"""`CoreAttention`: chooses a backend for a call, and plans or runs the stage `Attention` with it.

It also does what is the same for all backends: recomputation (`checkpoint_core_attention`), and the
special cases of torch.compile and functorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial

import torch

from transformer_engine.pytorch._torch_private import other_caller_active, refuse_tracing
from transformer_engine.pytorch.attention.backends.backend import (
    NO_BACKWARD,
    Backend,
    Gradients,
    Needs,
    Saved,
)
from transformer_engine.pytorch.attention.backends.choice import choose
from transformer_engine.pytorch.attention.core.call import TENSORS, Call, CallTensors
from transformer_engine.pytorch.attention.core.environment import environment, repeatable
from transformer_engine.pytorch.attention.stage import Attention, Options, run_forward
from transformer_engine.pytorch.chain.chain import ChainBuilder
from transformer_engine.pytorch.chain.node import call_chain
from transformer_engine.pytorch.chain.part import Incoming, Part, Planned, incoming
from transformer_engine.pytorch.recompute.compiled import checkpoint_in_graph

_is_compiling = torch.compiler.is_compiling


class CoreAttention(Part):
    """The stage `Attention`, planned for each backend and call; see `Part`."""

    def __init__(self) -> None:
        built = ChainBuilder("query", "key", "value")
        super().__init__(built.chain(*built.add(Attention(), 0, 1, 2)))

    def plan_call(self, values: Incoming, call: Call) -> Planned:
        """See `Part`; the formats of values are those of the call."""
        needs = _needs(values, call)
        backend = _backend_for(values.like, needs, call)
        return self._plan(backend, values, needs, call)

    def _plan(
        self, backend: Backend, values: Incoming, needs: tuple[bool, ...], call: Call
    ) -> Planned:
        if call.checkpoint and backend.keeps_scores:
            backend = _recomputed(backend)
        tensors = call.tensors
        same_ends = same_starts = False
        if call.shape.band is None and tensors.cu_seqlens_q is not None:
            same_ends = tensors.cu_seqlens_q is tensors.cu_seqlens_kv
            starts = tensors.cu_seqlens_q_padded
            same_starts = starts is not None and starts is tensors.cu_seqlens_kv_padded
            if same_ends:
                tensors = tensors._replace(cu_seqlens_kv=None)
            if same_starts:
                tensors = tensors._replace(cu_seqlens_kv_padded=None)
        fixed = repeatable(environment())
        options = Options(backend, backend.settings(call), same_ends, same_starts, fixed)
        parameters = (*tensors, None)
        if call.casts is None or call.casts.of_state:
            return self.planned(values, parameters, options, needs)
        # The scales are those of this call, so no other call can share the plan.
        return self._prepared(values.like.dtype, needs, options), parameters

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
    ) -> torch.Tensor:
        """Attention in the format of the call; the result ends with `heads * size`."""
        compiling = _is_compiling()
        if compiling and call.context is not None:
            # Context parallel ranks compare their calls in Python.
            from transformer_engine.pytorch.chain.outside_of_graphs import outside_of_graphs  # noqa: PLC0415

            return outside_of_graphs(self, query, key, value, call)
        transformed = not compiling and other_caller_active()
        if transformed:
            refuse_tracing("DotProductAttention")
        inputs = (query, key, value)
        coming = Incoming(inputs, (True,) * 3, True) if transformed else incoming(*inputs)
        needs = _needs(coming, call)
        recorded = any(needs)
        backend = _backend_for(query, needs, call)
        if call.checkpoint and backend.keeps_scores and compiling:
            call = call._replace(checkpoint=False)
            return checkpoint_in_graph(partial(self, *inputs, call))
        if recorded and backend.differentiable and (compiling or transformed):
            return run_forward(backend, query, key, value, call, NO_BACKWARD)[0]
        if recorded and (compiling or (query is key is value and call.casts is None)):
            # A compiler takes no tensor twice. If all three are one tensor, autograd adds the
            # gradient of value first.
            query, key, value = (x.view_as(x) for x in inputs)
        plan, parameters = self._plan(backend, coming, needs, call)
        step = None if call.casts is None else call.casts.step
        return call_chain(plan, step, query, key, value, *parameters)


def _backend_for(like: torch.Tensor, needs: tuple[bool, ...], call: Call) -> Backend:
    if call.context is not None and call.context.backend_for is not None:
        return call.context.backend_for(like, needs, call)
    return choose(like.device, like.dtype, any(needs), call)


def _needs(values: Incoming, call: Call) -> tuple[bool, ...]:
    """`CallPlan.needs`; only query, key, value, bias and sink may need gradients."""
    if not values.records:
        return _NO_NEEDS
    bias, sink = call.bias.tensor, call.sink.offset
    if bias is None and sink is None:
        return (*values.needs, *_NO_NEEDS[3:])
    tensors = CallTensors(bias=bias, sink=sink)
    return (*values.needs, *[x is not None and x.requires_grad for x in tensors], False)


_NO_NEEDS = (False,) * (3 + TENSORS + 1)


@lru_cache
def _recomputed(backend: Backend) -> Backend:
    """The same backend, whose backward runs the forward again instead of reading what it saved."""

    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, needs: Needs
    ) -> tuple[torch.Tensor, Saved | None]:
        if not any(needs):
            return backend.forward(query, key, value, call, needs)
        casts = call.casts
        if casts is not None:  # the module may update its scales before the backward
            casts = casts.with_copied_scales()
        states = _RandomStates(query.device) if call.dropout.p > 0.0 else None
        call = call._replace(casts=casts)
        out, _ = backend.forward(query, key, value, call, NO_BACKWARD)
        return out, Saved(None, (query, key, value, *call.tensors), (states, casts))

    def backward(grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
        query, key, value, *tensors = saved.tensors
        assert query is not None and key is not None and value is not None
        states, casts = saved.facts
        call = call.with_tensors(CallTensors(*tensors))
        if casts is not None:
            call = call._replace(casts=casts.for_recompute())
        random = nullcontext() if states is None else states.restored()
        with random:
            _, found = backend.forward(query, key, value, call, needs)
        assert found is not None
        return backend.backward(grad, found, call.settings(), needs)

    return backend._replace(forward=forward, backward=backward)


class _RandomStates:
    """The current states of torch's default generators, of the CPU and of a device.

    Inside a fork of a tracker these are the states of the tracker.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_cpu = torch.get_rng_state()
        self._of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Draw the same random numbers again, then restore the states that the generators had."""
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            torch.set_rng_state(self._of_cpu)
            if self._of_device is not None:
                torch.cuda.set_rng_state(self._of_device, self._device)
            yield
