"""Checkpoints in code that torch.compile compiles: parts that the graph's backward recomputes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from transformer_engine.pytorch._torch_private import without_side_effect_checks
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.kernels.library import is_exporting

_Policy = torch_checkpoint.CheckpointPolicy


def _policy(context: object, operator: object, *args: object, **kwargs: object) -> Any:
    """Recompute all but scales, which have changed until then, and memory of new scaling states."""
    must_save = (torch.ops.te.scales_of_call.default, torch.ops.te.spread.default)
    return _Policy.MUST_SAVE if operator in must_save else _Policy.PREFER_RECOMPUTE


_contexts = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, _policy)


def checkpoint_in_graph(
    function: Callable[[], Any], context_fn: Callable[[], Any] | None = None
) -> Any:
    """The result of `function`, which the backward of the graph computes again.

    Both runs draw the same random numbers. Side effects on Python's state happen once. With torch's
    `context_fn`, layers with delayed scaling are refused.
    """
    stack = autocast_stack()
    # An outer checkpoint recomputes everything inside, so an inner one has nothing to do.
    if stack.in_compiled_checkpoint or is_exporting() or not torch.is_grad_enabled():
        return function()
    stack.in_compiled_checkpoint = True
    try:
        return torch_checkpoint.checkpoint(
            lambda: without_side_effect_checks(function),
            use_reentrant=False,
            context_fn=context_fn or _contexts,
        )
    finally:
        stack.in_compiled_checkpoint = False
