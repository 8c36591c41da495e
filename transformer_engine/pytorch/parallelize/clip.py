"""`clip_grad_norm_` for models of which every rank has a part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from transformer_engine.pytorch.parallel.dtensors import local_part
from transformer_engine.pytorch.parallel.norms import check_max_norm, clipping, total_norm
from transformer_engine.pytorch.parallelize.parameters import held


def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Like `torch.nn.utils.clip_grad_norm_`, with the norm of the whole model's gradients.

    Ranks of tensor parallelism have shards of some parameters, and copies of others, which count
    once. `fully_shard` may have divided both again.

    Args:
        model: the model, also after `parallelize` and `fully_shard`. With sequence parallelism,
            call `all_reduce_sequence_parallel_grads` first.
        max_norm: the largest Euclidean norm of all gradients together.

    Returns:
        The norm before clipping.

    Raises:
        TypeError: parameters in place of a model; a norm that is not a number.
        ValueError: a norm that is negative or NaN.

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
    check_max_norm("clip_grad_norm_", max_norm)
    gradients: list[torch.Tensor] = []
    cut: list[bool] = []
    group = None
    for _, parameter, shard in held(model):
        if parameter.grad is not None:
            gradients.append(parameter.grad)
            cut.append(shard is not None)
            group = group if shard is None else shard.ranks.group
    if not gradients:
        return torch.zeros((), dtype=torch.float32)
    norm = total_norm(gradients, cut, group)
    _multiply(gradients, clipping(norm, max_norm))
    return norm


@torch.no_grad()
def _multiply(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients in place, with one call of torch for each device and dtype."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in map(local_part, gradients):
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for kind, some in alike.items():
        torch._foreach_mul_(some, factor.to(*kind))
