"""Measures the memory that autograd saves for a backward."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


@contextmanager
def saved_storages(parameters: bool = True) -> Iterator[dict[int, int]]:
    """Yields `{address: bytes}` of the storages of tensors that autograd saves inside.

    Storages of parameters are left out if `parameters` is False.
    """
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if parameters or not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found
