"""The documented import path of what serves distributed training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.parallel.sequences import gather_sequence, shard_sequence
from transformer_engine.pytorch.parallelize.checkpoints import get_state_dict, set_state_dict
from transformer_engine.pytorch.parallelize.clip import clip_grad_norm_
from transformer_engine.pytorch.parallelize.parameters import gather_parameter, shard_parameter
from transformer_engine.pytorch.recompute.checkpoint import checkpoint
from transformer_engine.pytorch.recompute.regions import recompute_context
from transformer_engine.pytorch.rng import CudaRNGStatesTracker, graph_safe_rng_available

__all__ = [
    "CudaRNGStatesTracker",
    "activation_recompute_forward",
    "checkpoint",
    "clip_grad_norm_",
    "gather_parameter",
    "gather_sequence",
    "get_state_dict",
    "graph_safe_rng_available",
    "in_fp8_activation_recompute_phase",
    "is_fp8_activation_recompute_enabled",
    "set_state_dict",
    "shard_parameter",
    "shard_sequence",
]


@contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    """What checkpointing functions of trainers open around their two forwards.

    Modules find out by themselves that a forward will be, or is, recomputed, from
    the autograd function that runs it: scales and amaxes are treated so whether or not this is
    open.

    Args:
        activation_recompute: the forward is one of two.
        recompute_phase: it is the second.
    """
    yield


def is_fp8_activation_recompute_enabled() -> bool:
    """Whether modules called now run in FP8 in a part of a model that runs twice."""
    stack = autocast_stack()
    here = recompute_context(stack.recomputed, stack.regions)
    return stack.scope.enabled and (bool(here.open_regions) or here.recomputed is not None)


def in_fp8_activation_recompute_phase() -> bool:
    """Whether modules called now run in FP8 for the second time."""
    stack = autocast_stack()
    return (
        stack.scope.enabled
        and recompute_context(stack.recomputed, stack.regions).recomputed is not None
    )
