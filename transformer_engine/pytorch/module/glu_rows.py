"""Two orders of the rows of a gated weight: gate, then linear part; or blocks of both in turn."""

from __future__ import annotations

import torch

from transformer_engine.pytorch.module.arguments import check_sizes
from transformer_engine.pytorch.module.inputs import check_tensors


def interleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """Reorder `[gate, linear]` to blocks of the gate and of the linear part in turn.

    Args:
        tensor: weight or bias `[2 * features, ...]`, the gate's rows first.
        interleave_size: rows of a block; it divides `features`.

    Returns:
        A new tensor of the same shape.

    Raises:
        ValueError: rows that do not make whole blocks.

    >>> interleave_glu_tensor(torch.arange(8), 2).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    blocks = _blocks("interleave_glu_tensor", tensor, interleave_size)
    return tensor.reshape(2, blocks, interleave_size, -1).transpose(0, 1).reshape(tensor.shape)


def deinterleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """Reverse `interleave_glu_tensor`.

    Args:
        tensor: weight or bias `[2 * features, ...]`.
        interleave_size: rows of a block; it divides `features`.

    Returns:
        A new tensor of the same shape.

    Raises:
        ValueError: rows that do not make whole blocks.

    >>> deinterleave_glu_tensor(torch.tensor([0, 1, 4, 5, 2, 3, 6, 7]), 2).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    blocks = _blocks("deinterleave_glu_tensor", tensor, interleave_size)
    return tensor.reshape(blocks, 2, interleave_size, -1).transpose(0, 1).reshape(tensor.shape)


def _blocks(op: str, tensor: torch.Tensor, size: int) -> int:
    """Blocks in each half."""
    check_tensors(op, tensor=tensor)
    check_sizes(op, None, interleave_size=size)
    if tensor.dim() == 0 or tensor.shape[0] % (2 * size):
        raise ValueError(
            f"[{op}] expected 2 * features rows with features divisible by interleave_size, got"
            f" {tuple(tensor.shape)} and interleave_size={size}"
        )
    return tensor.shape[0] // (2 * size)
