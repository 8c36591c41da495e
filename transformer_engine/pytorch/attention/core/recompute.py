"""Core attention recomputed in the backward, with the random numbers of the forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, repeat
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from transformer_engine.pytorch.rng import StatesOf, snapshot


def recomputed(
    function: Callable[..., torch.Tensor],
    again: Callable[..., torch.Tensor],
    tracker: Any,
    *args: Any,
) -> torch.Tensor:
    """`function(*args)`, whose activations are not kept but computed again in the backward.

    Args:
        function: may draw random numbers from torch's generators and from `tracker`.
        again: does the same in the backward.
        tracker: named RNG states that `function` forks; None where it uses the default ones.
        args: what `function` takes; tensors that need a gradient must be among them.
    """
    states = None if tracker is None else snapshot(tracker.get_states())

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), nullcontext() if states is None else StatesOf(tracker, states)

    runs = chain((function,), repeat(again))

    def run(*args: Any) -> torch.Tensor:
        return next(runs)(*args)

    out: torch.Tensor = checkpoint(
        run, *args, use_reentrant=False, context_fn=contexts, preserve_rng_state=True
    )
    return out
