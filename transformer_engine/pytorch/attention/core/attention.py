"""One call of dot product attention: a backend is chosen, and run with the right random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from itertools import product
from typing import Any

import torch

from transformer_engine.pytorch._torch_private import bare_apply, other_autodiff_active
from transformer_engine.pytorch.attention.backends import exported
from transformer_engine.pytorch.attention.backends.backend import (
    NO_BACKWARD,
    Backend,
    Gradients,
    Needs,
    Saved,
)
from transformer_engine.pytorch.attention.backends.choice import choose
from transformer_engine.pytorch.attention.core.call import NO_BIAS, NO_SINK, Call
from transformer_engine.pytorch.export.onnx import exporting
from transformer_engine.pytorch.fp8.autocast import autocast_stack
from transformer_engine.pytorch.module.inputs import autocast_dtype
from transformer_engine.pytorch.recompute.compiled import checkpoint_in_graph

_is_compiling = torch.compiler.is_compiling


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
) -> torch.Tensor:
    """Attend in the call's format; the heads of the result are flat."""
    if exporting():
        return exported.attend(query, key, value, call)
    backend = choose(query, key, value, call)
    if call.checkpoint and backend.keeps_scores and _is_compiling():
        call = call._replace(checkpoint=False)
        return checkpoint_in_graph(partial(_attend_randomly, backend, query, key, value, call))
    return _attend_randomly(backend, query, key, value, call)


def _attend_randomly(
    backend: Backend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
) -> torch.Tensor:
    if call.dropout.tracker is None:
        return _attend(backend, query, key, value, call)
    with call.dropout.tracker.fork():
        return _attend(backend, query, key, value, call)


def _attend(
    backend: Backend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
) -> torch.Tensor:
    plain = call.bias is NO_BIAS and call.sink is NO_SINK
    bias, sink = factors = (None, None) if plain else (call.bias.tensor, call.sink.offset)
    compiling = _is_compiling()
    transformed = not compiling and other_autodiff_active()
    recorded = transformed or (
        torch.is_grad_enabled()
        and (
            query.requires_grad
            or key.requires_grad
            or value.requires_grad
            or (bias is not None and bias.requires_grad)
            or (sink is not None and sink.requires_grad)
        )
    )
    if not recorded or (backend.differentiable and (compiling or transformed)):
        return backend.forward(query, key, value, call, NO_BACKWARD)[0]
    if compiling or (query is key is value and call.casts is None):
        # Compilers take no tensor twice. Gradients of one tensor are added up value first.
        query, key, value = (x.view_as(x) for x in (query, key, value))
    apply = AttentionFunction.apply if compiling or transformed else _bare_apply
    if call.checkpoint and backend.keeps_scores:
        backend = _recomputed(backend)
    run = (backend, call)
    out: torch.Tensor = (
        apply(run, query, key, value) if plain else apply(run, query, key, value, *factors)
    )
    return out


class AttentionFunction(torch.autograd.Function):
    """The two functions of a backend; `factors` are bias and sink, or nothing without either."""

    @staticmethod
    def forward(
        ctx: Any,
        run: tuple[Backend, Call],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *factors: torch.Tensor | None,
    ) -> torch.Tensor:
        """The result; what the backward reads is saved in `ctx`."""
        backend, call = run
        needs = _NEEDS[ctx.needs_input_grad]
        out, saved = backend.forward(query, key, value, call, needs)
        if saved is not None:
            ctx.save_for_backward(saved.log_sum_exp, *saved.tensors)
            ctx.run = (backend, call.settings(), needs, saved.facts, 3 + len(factors))
        if not _is_compiling() and out._is_view():
            out = out.detach()  # autograd refuses to change views in place that a function made
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of all arguments."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "[attention] expected create_graph=False, got True: gradients of gradients are not"
                " supported"
            )
        backend, call, needs, facts, count = ctx.run
        tensors = ctx.saved_tensors
        gradients = backend.backward(grad, Saved(tensors[0], tensors[1:], facts), call, needs)
        if call.casts is not None and call.casts.ends_backward:
            autocast_stack().end_backward()
        return None, *gradients[:count]


_bare_apply = bare_apply(AttentionFunction)
# By `needs_input_grad`: looked up, because the host waits for it.
_NEEDS = {
    (False, *flags): Needs(*flags)
    for count in (3, 5)
    for flags in product((False, True), repeat=count)
}


@lru_cache
def _recomputed(backend: Backend) -> Backend:
    """The same backend, whose backward runs the forward again instead of reading what it saved."""

    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, needs: Needs
    ) -> tuple[torch.Tensor, Saved | None]:
        casts = call.casts
        if casts is not None:  # by the backward, scales have moved on
            casts = casts.repeatable()
        states = _RandomStates(query.device) if call.dropout.p > 0.0 else None
        call = call._replace(casts=casts)
        out, _ = backend.forward(query, key, value, call, NO_BACKWARD)
        return out, Saved(None, (query, key, value, *call.tensors), (states, casts))

    def backward(grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
        query, key, value, *tensors = saved.tensors
        assert query is not None and key is not None and value is not None
        states, casts = saved.facts
        call = call.with_tensors(tensors)
        if casts is not None:
            call = call._replace(casts=casts.again())
        random = nullcontext() if states is None else states.restored()
        with random, _without_torch_autocast(query):  # which has cast the inputs, or came later
            _, found = backend.forward(query, key, value, call, needs)
        assert found is not None
        return backend.backward(grad, found, call.settings(), needs)

    return backend._replace(forward=forward, backward=backward)


def _without_torch_autocast(x: torch.Tensor) -> AbstractContextManager[Any]:
    if autocast_dtype(x) is None:
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


class _RandomStates:
    """States of torch's default generators, of the CPU and of a device, as they are now.

    Within a fork of a tracker they are the tracker's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_cpu = torch.get_rng_state()
        self._of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, numbers are drawn again; they leave no trace."""
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            torch.set_rng_state(self._of_cpu)
            if self._of_device is not None:
                torch.cuda.set_rng_state(self._of_device, self._device)
            yield
