"""The documented import path of the functions for distributed training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from transformer_engine.pytorch.attention.context.sequences import gather_sequence, shard_sequence
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.fp8.recompute_regions import (
    announce_checkpoint,
    announced_region,
    recompute_context,
)
from transformer_engine.pytorch.parallel.collectives import (
    Pending,
    all_gather,
    all_reduce,
    reduce_scatter,
)
from transformer_engine.pytorch.parallelize.checkpoints import get_state_dict, set_state_dict
from transformer_engine.pytorch.parallelize.clip import clip_grad_norm_
from transformer_engine.pytorch.parallelize.parameters import gather_parameter, shard_parameter
from transformer_engine.pytorch.recompute.checkpoint import checkpoint
from transformer_engine.pytorch.rng import (
    CudaRNGStatesTracker,
    get_all_rng_states,
    graph_safe_rng_available,
    set_all_rng_states,
)

__all__ = [
    "CudaRNGStatesTracker",
    "activation_recompute_forward",
    "allreduce",
    "checkpoint",
    "clip_grad_norm_",
    "gather_along_first_dim",
    "gather_parameter",
    "gather_sequence",
    "get_all_rng_states",
    "get_distributed_rank",
    "get_distributed_world_size",
    "get_state_dict",
    "graph_safe_rng_available",
    "in_fp8_activation_recompute_phase",
    "is_fp8_activation_recompute_enabled",
    "prepare_te_modules_for_fsdp",
    "reduce_scatter_along_first_dim",
    "set_all_rng_states",
    "set_state_dict",
    "shard_parameter",
    "shard_sequence",
]


@contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    """The context that checkpointing functions of trainers open around each of their two forwards.

    In the second forward, layers use the scope and the scales of the first, and record no amaxes.
    If the second forward runs in the backward of the autograd function that ran the first, layers
    find this out without the context. If a hook on a tensor starts it, both forwards must run
    inside this context. Of several checkpoints of the same layer, the newest is assumed to be
    recomputed first, which is the order of autograd.

    Args:
        activation_recompute: the forward belongs to a checkpoint, which runs it twice.
        recompute_phase: this is the second forward.
    """
    stack = autocast_stack()
    before = stack.recomputed
    if activation_recompute and not torch.compiler.is_compiling():
        if not recompute_phase:
            announce_checkpoint()
        elif before is None:
            stack.recomputed = announced_region()
    try:
        yield
    finally:
        stack.recomputed = before


def is_fp8_activation_recompute_enabled() -> bool:
    """Whether modules called now run in FP8, in a part of a model that will be or is recomputed."""
    stack = autocast_stack()
    here = recompute_context(stack.recomputed, stack.regions)
    return stack.scope.enabled and (bool(here.open_regions) or here.recomputed is not None)


def in_fp8_activation_recompute_phase() -> bool:
    """Whether modules called now run in FP8, in the second forward of a checkpoint."""
    stack = autocast_stack()
    return (
        stack.scope.enabled
        and recompute_context(stack.recomputed, stack.regions).recomputed is not None
    )


def get_distributed_world_size(group: Any = None) -> int:
    """The number of ranks of a group (None: of all); 1 without torch.distributed.

    >>> get_distributed_world_size()
    1
    """
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def get_distributed_rank(group: Any = None) -> int:
    """This rank's number in a group; 0 without torch.distributed.

    >>> get_distributed_rank()
    0
    """
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


Started = tuple[torch.Tensor, Any]  # a tensor, and a handle whose `wait()` fills it, or None


def allreduce(inp: torch.Tensor, tp_group: Any = None, async_op: bool = False) -> Started:
    """Sum a tensor over ranks, in place.

    Args:
        inp: contiguous.
        tp_group: process group; None is all ranks.
        async_op: do not wait.

    Returns:
        `(inp, handle)`; the handle is None unless `async_op`.

    >>> allreduce(torch.ones(2))
    (tensor([1., 1.]), None)
    """
    if get_distributed_world_size(tp_group) == 1:
        return inp, None
    return _started(all_reduce(inp, tp_group), async_op)


def gather_along_first_dim(
    inp: torch.Tensor, process_group: Any, async_op: bool = False, quantizer: Any = None
) -> Started:
    """Concatenate the tensors of all ranks.

    Args:
        inp: `[rows, ...]`, of equal shape on all ranks.
        process_group: the ranks.
        async_op: do not wait.
        quantizer: quantises the result, for which the call waits; or None.

    Returns:
        `([ranks * rows, ...], handle)`; the handle is None unless `async_op`.

    >>> gather_along_first_dim(torch.ones(2), None)
    (tensor([1., 1.]), None)
    """
    if get_distributed_world_size(process_group) == 1:
        return (inp if quantizer is None else quantizer(inp)), None
    gathered = all_gather(inp.contiguous(), process_group)
    if quantizer is not None:
        return quantizer(gathered.wait()), None
    return _started(gathered, async_op)


def reduce_scatter_along_first_dim(
    inp: torch.Tensor, tp_group: Any, async_op: bool = False
) -> Started:
    """Sum a tensor over ranks; each rank gets its rows of the sum.

    Args:
        inp: `[rows, ...]`; the number of ranks divides `rows`.
        tp_group: process group.
        async_op: do not wait.

    Returns:
        `([rows / ranks, ...], handle)`; the handle is None unless `async_op`.

    Raises:
        ValueError: rows that cannot be divided.

    >>> reduce_scatter_along_first_dim(torch.ones(2), None)
    (tensor([1., 1.]), None)
    """
    ranks = get_distributed_world_size(tp_group)
    if ranks == 1:
        return inp, None
    if inp.shape[0] % ranks:
        raise ValueError(
            f"[reduce_scatter_along_first_dim] expected rows divisible by {ranks} ranks, got"
            f" {tuple(inp.shape)}"
        )
    return _started(reduce_scatter(inp.contiguous(), tp_group), async_op)


def _started(pending: Pending, async_op: bool) -> Started:
    return (pending.result, pending) if async_op else (pending.wait(), None)


def prepare_te_modules_for_fsdp(fsdp_root: nn.Module) -> None:
    """Does nothing: modules of this package need no preparation for FSDP.

    Args:
        fsdp_root: a model in FullyShardedDataParallel.
    """
