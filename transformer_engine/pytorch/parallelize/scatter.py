"""Modules before and between layers, whose tokens ranks of sequence parallelism have in parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch.parallel.gradients import mark_own_tokens
from transformer_engine.pytorch.parallel.groups import TensorParallel


def scatter_output(module: nn.Module, ranks: TensorParallel, cut: bool) -> None:
    """Note that gradients of its parameters are of a rank's tokens, and cut its output.

    Args:
        module: any; its output is one tensor.
        ranks: that have the parts.
        cut: its output is of all tokens, and a rank goes on with its part of them.
    """
    mark_own_tokens(module, ranks)
    if cut:
        module.register_forward_hook(partial(_own_part, ranks))


def _own_part(
    ranks: TensorParallel, module: nn.Module, arguments: Any, out: torch.Tensor
) -> torch.Tensor:
    if out.shape[0] % ranks.size:
        raise ValueError(
            f"[parallelize] expected a first size that can be divided by tp_size={ranks.size}, got "
            f"{out.shape[0]}, with sequence_parallel=True"
        )
    assert ranks.rank is not None
    return out.chunk(ranks.size)[ranks.rank]
