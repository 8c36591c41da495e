"""Allocates uninitialised memory by torch's fastest function, which its compiled code calls.

That function takes half the time of `torch.empty_strided`, which takes half that of `torch.empty`.
But it only allocates on the current device, and dispatch modes do not see it. So tensors are
allocated in torch's usual way while a dispatch mode is active: recordings are made under one, and
only know memory that it has seen.
"""

from __future__ import annotations

import functools
import math

import torch

from transformer_engine import _C
from transformer_engine.pytorch._torch_private import (
    Allocator,
    current_gpu,
    dispatch_modes,
    empty_on_cpu,
    empty_on_gpu,
)

_Tensor = torch.Tensor
_ALIGNMENT = 512  # as that of torch's allocator, so that the same kernels are chosen


def allocators(device: torch.device) -> list[Allocator]:
    """Functions that allocate by sizes, strides and dtype; `_C` tries them in this order.

    The first one allocates on the current device, which may be another one when it is called.
    """

    def allocate(
        sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)

    here = device.type == "cpu" or device.index == current_gpu()
    shortest = {"cpu": empty_on_cpu, "cuda": empty_on_gpu}.get(device.type)
    return [allocate] if shortest is None or not here else [shortest, allocate]


def new_empty(
    like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`like.new_empty(shape, dtype=dtype)`, but faster on the current GPU in eager mode."""
    if (
        type(like) is _Tensor  # not a fake tensor
        and like.is_cuda
        and empty_on_gpu is not None
        and like.get_device() == current_gpu()
        and not dispatch_modes()
    ):
        return empty_on_gpu(tuple(shape), strides_of(shape), dtype or like.dtype)
    return like.new_empty(shape, dtype=dtype)


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """`x.contiguous()`; by a call of `_C`, which can be recorded, if rows have one distance.

    A range of one axis of a contiguous tensor has such rows.
    """
    if x.is_contiguous() or not _has_even_rows(x.shape, x.stride()):
        return x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _C.copy(x, out)
    return out


@functools.lru_cache(maxsize=1024)
def _has_even_rows(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether `_C.copy` reads a tensor of these strides: contiguous rows at one distance."""
    axes = [(n, stride) for n, stride in zip(shape, strides, strict=True) if n > 1]
    row = 1
    while axes and axes[-1][1] == row:
        row *= axes.pop()[0]
    distance = axes[-1][1] if axes else row
    rows = 1
    while axes and axes[-1][1] == distance * rows:
        rows *= axes.pop()[0]
    return row > 1 and distance >= row and not axes


@functools.lru_cache(maxsize=1024)
def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def aligned(size: int) -> int:
    """`size` in bytes, rounded up to where the next tensor of a slab begins."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
