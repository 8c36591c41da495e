"""Tensors made from addresses, by which recorded calls name them (csrc/bindings/recording.h)."""

from __future__ import annotations

import ctypes
import math

import torch

from transformer_engine.pytorch.dtypes import TORCH_DTYPES, DType


def tensor_at(address: int, dtype: int, sizes: tuple[int, ...], device: int) -> torch.Tensor:
    """A contiguous tensor in memory that another tensor owns, and must keep alive.

    `dtype` is a value of `DType`, `device` the index of the CUDA device, -1 for the CPU.
    """
    element = TORCH_DTYPES[dtype]
    size = math.prod(sizes) * element.itemsize
    if device >= 0:
        found = torch.as_tensor(_DeviceBytes(address, size), device=torch.device("cuda", device))
        return found.view(element).view(sizes)
    memory = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(memory, dtype=element).view(sizes)


def weak_view(x: torch.Tensor) -> torch.Tensor:
    """A tensor with the memory of `x`, which it does not keep alive."""
    if not x.numel():
        return torch.empty_like(x)
    elements = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    device = x.device.index if x.is_cuda else -1
    whole = tensor_at(x.data_ptr(), int(DType.kByte), (elements * x.itemsize,), device)
    return whole.view(x.dtype).as_strided(x.shape, x.stride())


class _DeviceBytes:
    """Memory of a GPU, described by the interface from which torch makes tensors."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }
