"""Sums gradients of replicated parameters over sequence parallel ranks.

Each of these ranks computes such gradients from its own tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from transformer_engine.pytorch._torch_private import once_differentiable
from transformer_engine.pytorch.parallel.collectives import all_reduce
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
    with torch.no_grad():
        for parameter, ranks in _replicated(module):
            grad = getattr(parameter, "main_grad", None)
            grad = parameter.grad if grad is None else grad
            if grad is not None:
                grad = local_part(grad)
                buckets.setdefault((ranks.group, grad.dtype, grad.device), []).append(grad)
        for (group, _, _), grads in buckets.items():
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            dist.all_reduce(flat, group=group)
            parts = flat.split([grad.numel() for grad in grads])
            summed = [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)]
            torch._foreach_copy_(grads, summed)


def mark_own_tokens(module: nn.Module, ranks: TensorParallel) -> None:
    """Mark a module of which each of the `ranks` computes gradients from its own tokens alone."""
    setattr(module, _TOKENS, ranks)


def _replicated(module: nn.Module) -> list[tuple[nn.Parameter, TensorParallel]]:
    """Parameters whose gradients are summed, with the ranks of the innermost module that has some.

    It runs in every step, so it reads the dicts of modules: their `__getattr__` takes longer.
    """
    known: dict[nn.Module, TensorParallel | None] = {}
    found: dict[nn.Parameter, TensorParallel] = {}
    seen: set[nn.Module] = set()

    def visit(part: nn.Module, ranks: TensorParallel | None, marked: bool) -> None:
        if part in seen:
            return
        seen.add(part)
        ranks = _first_ranks(part, known) or ranks
        marked = marked or _TOKENS in part.__dict__
        for child in reversed(part._modules.values()):
            if child is not None:
                visit(child, ranks, marked)
        if ranks is None:
            return
        for name, parameter in part._parameters.items():
            if parameter is not None and (marked or _is_named(part, name, parameter)):
                found.setdefault(parameter, ranks)

    visit(module, None, False)
    return list(found.items())


def _is_named(part: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Whether the parameter, or its spec, which `fully_shard` keeps, has `sequence_parallel`."""
    if getattr(parameter, "sequence_parallel", False):
        return True
    specs = part.__dict__.get("_parameter_set")
    spec = None if specs is None else specs.spec(name)
    return spec is not None and bool(spec.attributes.get("sequence_parallel", False))


def _first_ranks(
    module: nn.Module, known: dict[nn.Module, TensorParallel | None]
) -> TensorParallel | None:
    """The sequence parallel ranks of a module, or of the first of its parts that has some."""
    if module not in known:
        own = module.__dict__.get(_TOKENS, module.__dict__.get("ranks"))
        is_own = isinstance(own, TensorParallel) and own.sequence
        known[module] = own if is_own else None
        for child in module._modules.values() if not is_own else ():
            if child is not None and (inside := _first_ranks(child, known)) is not None:
                known[module] = inside
                break
    return known[module]


def with_summed_gradients(
    parameters: Sequence[torch.Tensor | None], ranks: TensorParallel
) -> Sequence[torch.Tensor | None]:
    """The parameters; the backward sums their gradients over the ranks."""
    if not torch.is_grad_enabled():
        return parameters
    group = ranks.check()
    return [_Summed.apply(x, group) if x is not None and x.requires_grad else x for x in parameters]


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group).wait(), None
