"""The norm of the gradients of a model of which every rank has a part."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from transformer_engine.pytorch.parallel.dtensors import local_part, whole_value
from transformer_engine.pytorch.parallelize.parameters import held


def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, with the norm of what all ranks have together.

    Ranks of tensor parallelism have parts of some parameters and all of others, which count once.
    Behind `fully_shard` gradients are parts of those.

    Args:
        model: that `parallelize` and `fully_shard` may have cut; with sequence parallelism call
            `all_reduce_sequence_parallel_grads` first.
        max_norm: of all gradients together, in the Euclidean sense.

    Returns:
        The norm before clipping.

    Raises:
        TypeError: parameters in place of a model.

    >>> model = nn.Linear(4, 2)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> clip_grad_norm_(model, 1.0)
    tensor(3.1623)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            "[clip_grad_norm_] expected a model, whose layers know which parts of parameters they"
            f" have, got {type(model).__name__}"
        )
    parts: list[torch.Tensor] = []
    alone: list[torch.Tensor] = []
    group = None
    for _, parameter, shard in held(model):
        if parameter.grad is not None:
            (alone if shard is None else parts).append(parameter.grad)
            group = group if shard is None else shard.ranks.group
    if not parts:
        return whole_value(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
    square = whole_value(nn.utils.get_total_norm(parts)).square()
    dist.all_reduce(square, group=group)
    if alone:
        square = square + whole_value(nn.utils.get_total_norm(alone)).square()
    total = square.sqrt()
    for grads in (parts, alone):
        with torch.no_grad():
            factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([local_part(grad) for grad in grads], factor)
    return total
