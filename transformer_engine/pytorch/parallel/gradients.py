"""Sums gradients over sequence parallel ranks, which compute them from their own tokens alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from transformer_engine.pytorch.parallel.dtensors import local_part
from transformer_engine.pytorch.parallel.groups import TensorParallel

_TOKENS = "_ranks_with_other_tokens"


def all_reduce_sequence_parallel_grads(module: nn.Module) -> None:
    """Sum the gradients of parameters that sequence parallel ranks replicate, after the backward.

    With `sequence_parallel` each rank computes the gradients of norms, and of biases of
    row-parallel layers, from its own tokens. Trainers such as Megatron-Core sum them: they look for
    the attribute `sequence_parallel` of these parameters. Without such a trainer call this before
    the optimizer's step. It sums `main_grad` of a parameter that has one, else `grad`.

    Args:
        module: a model, whose layers know their tensor parallel groups.

    >>> import torch
    >>> import transformer_engine.pytorch as te
    >>> layer = te.TransformerLayer(64, 128, 4, device="cpu")
    >>> layer(torch.randn(8, 2, 64)).sum().backward()
    >>> te.all_reduce_sequence_parallel_grads(layer)  # one rank: nothing to do
    """
    buckets: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    replicated, seen = _replicated_parameters(module), set[int]()
    for layer, ranks in _layers(module):
        for parameter in layer.parameters():
            grad = getattr(parameter, "main_grad", None)
            grad = parameter.grad if grad is None else grad
            if id(parameter) not in replicated or grad is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            grad = local_part(grad)
            buckets.setdefault((ranks.group, grad.dtype, grad.device), []).append(grad)
    for (group, _, _), grads in buckets.items():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=group)
        parts = flat.split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))


def mark_own_tokens(module: nn.Module, ranks: TensorParallel) -> None:
    """Mark a module whose ranks compute gradients from their own tokens alone.

    Args:
        module: any module.
        ranks: the ranks to sum its gradients over.
    """
    setattr(module, _TOKENS, ranks)


def _replicated_parameters(module: nn.Module) -> set[int]:
    """Ids of the parameters to sum. `fully_shard` drops their attribute, but keeps the spec."""
    found: set[int] = set()
    for part in module.modules():
        if hasattr(part, _TOKENS):
            found.update(map(id, part.parameters()))
        specs = getattr(part, "_parameter_set", None)
        for name, parameter in part.named_parameters(recurse=False):
            spec = None if specs is None else specs.spec(name)
            named = spec is not None and spec.attributes.get("sequence_parallel", False)
            if named or getattr(parameter, "sequence_parallel", False):
                found.add(id(parameter))
    return found


def _layers(module: nn.Module) -> list[tuple[nn.Module, TensorParallel]]:
    """Modules, innermost first, with the sequence parallel ranks of the module or its parts."""
    found: list[tuple[nn.Module, TensorParallel]] = []
    for child in module.modules():
        inside = [getattr(part, _TOKENS, getattr(part, "ranks", None)) for part in child.modules()]
        ranks = [one for one in inside if isinstance(one, TensorParallel) and one.sequence]
        if ranks:
            found.append((child, ranks[0]))
    return found[::-1]
