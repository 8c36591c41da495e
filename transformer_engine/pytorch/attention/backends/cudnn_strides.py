"""Which strides cuDNN reads, and tensors that have them."""

from __future__ import annotations

import torch

from transformer_engine.pytorch.capture import memoize
from transformer_engine.pytorch.kernels.packed import packed_layout_of


def readable(*inputs: torch.Tensor, placed: bool) -> tuple[torch.Tensor, ...]:
    """The tensors, copied if their strides do not let cuDNN read 16 bytes at a time.

    Where it is told the place of each sequence, and a backward follows (`placed`), it wants
    gradients with the strides of inputs: those are the parts of one tensor that
    `attention_backward` makes, or contiguous tensors (docs/adr/0013-cudnn-graphs.md).
    """
    if placed and (torch.compiler.is_compiling() or packed_layout_of(*inputs) is None):
        return tuple(x.contiguous() for x in inputs)
    strides = inputs[0].stride()
    if _in_eights(strides) and all([x.stride() == strides for x in inputs]):
        return inputs
    read = reads(*inputs)
    return tuple(
        x if readable else x.clone(memory_format=torch.contiguous_format)
        for x, readable in zip(inputs, read, strict=True)
    )


def reads(*inputs: torch.Tensor) -> tuple[bool, ...]:
    """Which of these tensors cuDNN can read with the strides they have."""
    return _read(tuple([(x.shape, x.stride()) for x in inputs]))


@memoize
def _in_eights(strides: tuple[int, ...]) -> bool:
    """Whether cuDNN can read tensors of these strides, whatever their sizes."""
    return strides[-1] == 1 and all(stride > 0 and stride % 8 == 0 for stride in strides[:-1])


@memoize
def _read(layouts: tuple[tuple[torch.Size, tuple[int, ...]], ...]) -> tuple[bool, ...]:
    """Which of tensors of these shapes and strides cuDNN can read."""
    return tuple([_in_steps_of_eight(*layout) for layout in layouts])


def _in_steps_of_eight(sizes: torch.Size, strides: tuple[int, ...]) -> bool:
    return strides[-1] == 1 and all(
        size == 1 or (stride > 0 and stride % 8 == 0)
        for size, stride in zip(sizes[:-1], strides[:-1], strict=True)
    )
