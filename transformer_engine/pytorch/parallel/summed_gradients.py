"""Parameters that all tensor parallel ranks have, of which each computes a part of the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch._torch_private import once_differentiable
from transformer_engine.pytorch.parallel.collectives import all_reduce
from transformer_engine.pytorch.parallel.groups import TensorParallel


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
