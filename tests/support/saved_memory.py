"""What autograd saves for a backward."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


@contextmanager
def saved_storages(parameters: bool = True) -> Iterator[dict[int, int]]:
    """Bytes of each storage of which a tensor is saved inside, by address.

    Those of parameters may be left out.
    """
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if parameters or not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found
