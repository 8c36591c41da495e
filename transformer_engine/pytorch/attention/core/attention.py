"""One call of dot product attention: a backend is chosen, and run with the right random numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from transformer_engine.pytorch.attention.backends import exported
from transformer_engine.pytorch.attention.backends.choice import choose
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.attention.core.recompute import recomputed
from transformer_engine.pytorch.export.onnx import exporting
from transformer_engine.pytorch.recompute.compiled import checkpoint_in_graph


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
) -> torch.Tensor:
    """Attend in the call's format; the heads of the result are flat."""
    if exporting():
        return exported.attend(query, key, value, call)
    backend = choose(query, key, value, call)
    if call.dropout.p == 0.0 and not call.checkpoint:
        return backend.attend(query, key, value, call)
    if not (call.checkpoint and backend.keeps_scores and torch.is_grad_enabled()):
        return _attend_randomly(backend.attend, call, query, key, value)
    if torch.compiler.is_compiling():  # what casts need is of this call alone
        run = partial(_attend_randomly, backend.attend, call, query, key, value)
        return checkpoint_in_graph(run)
    first = again = call
    if call.casts is not None:  # by the backward, scales have moved on
        kept = call.casts.repeatable()
        first, again = call._replace(casts=kept), call._replace(casts=kept.again())
    runs = (partial(_attend_randomly, backend.attend, one) for one in (first, again))
    return recomputed(*runs, call.dropout.tracker, query, key, value)


def _attend_randomly(
    backend_attend: Callable[..., torch.Tensor],
    call: Call,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    if call.dropout.tracker is None:
        return backend_attend(query, key, value, call)
    with call.dropout.tracker.fork():
        return backend_attend(query, key, value, call)
