"""Which strides and addresses attention kernels read, and tensors that have them."""

from __future__ import annotations

import math

import torch

from transformer_engine.pytorch._torch_private import FakeTensor, transforms_active
from transformer_engine.pytorch.capture import memoize
from transformer_engine.pytorch.kernels.memory import contiguous
from transformer_engine.pytorch.kernels.packed import packed_layout_of

_PACK = 16  # bytes


def readable(x: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if kernels of torch and flash-attn on a GPU would misread it.

    These kernels read 16 bytes at a time (fewer if a head is no multiple of 16 bytes), and not all
    of them check that the address and the strides allow it. In compiled code this is up to
    torch.compile.
    """
    if (
        not x.is_cuda
        or torch.compiler.is_compiling()
        or transforms_active()
        or isinstance(x, FakeTensor)
        or (x.data_ptr() % _PACK == 0 and _in_packs(x.stride(), x.shape[-1], x.itemsize))
    ):
        return x
    return _contiguous_copy(x)


def _contiguous_copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@memoize
def _in_packs(strides: tuple[int, ...], size: int, itemsize: int) -> bool:
    """Whether heads are contiguous, and strides are multiples of what kernels read at a time."""
    step = math.gcd(_PACK, size * itemsize) // itemsize
    return strides[-1] == 1 and all(stride % step == 0 for stride in strides[:-1])


def readable_by_cudnn(*inputs: torch.Tensor, placed: bool) -> tuple[torch.Tensor, ...]:
    """The tensors, copied if their strides do not let cuDNN read 16 bytes at a time.

    With `placed`, cuDNN is told where each sequence lies, and a backward follows. That backward
    needs gradients with the strides of the inputs (docs/adr/0013-cudnn-graphs.md). So the inputs
    must be the parts of one tensor, in whose layout `attention_backward` makes gradients, or they
    are made contiguous.
    """
    if placed and torch.compiler.is_compiling():
        return tuple(x.contiguous() for x in inputs)
    if placed and packed_layout_of(*inputs) is None:
        return tuple([contiguous(x) for x in inputs])
    return tuple([x if _in_eights(x.stride()) else _contiguous_copy(x) for x in inputs])


@memoize
def _in_eights(strides: tuple[int, ...]) -> bool:
    """Whether cuDNN can read tensors of these strides, whatever their sizes."""
    return strides[-1] == 1 and all(stride > 0 and stride % 8 == 0 for stride in strides[:-1])
