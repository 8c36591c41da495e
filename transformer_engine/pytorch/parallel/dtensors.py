"""DTensors and their checkpoints, imported at the first use, because that takes half a second."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from transformer_engine.pytorch._torch_private import functional_collectives

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def dtensors() -> Any:
    """The module `torch.distributed.tensor`."""
    return importlib.import_module("torch.distributed.tensor")


def dtensor_states() -> Any:
    """The module `torch.distributed.checkpoint.state_dict`."""
    return importlib.import_module("torch.distributed.checkpoint.state_dict")


def is_dtensor(x: Any) -> TypeGuard[DTensor]:
    """Whether an object is a DTensor, or another tensor that has a local part."""
    return hasattr(x, "to_local")


def is_unfinished(x: Any) -> bool:
    """Whether a tensor waits for a functional collective (`AsyncCollectiveTensor`) when it is read.

    Kernels of ours cannot read it.
    """
    return hasattr(x, "trigger_wait")


def wait_tensor(x: Any) -> torch.Tensor:
    """The plain tensor that a collective has written; autograd goes through."""
    return functional_collectives.wait_tensor(x)


def local_part(x: Any) -> torch.Tensor:
    """This rank's part of a DTensor, after waiting for it."""
    if not is_dtensor(x):
        return x
    part = x.to_local()
    return part.wait() if hasattr(part, "wait") else part


def whole_value(x: Any) -> torch.Tensor:
    """The whole tensor of which the ranks have parts."""
    return x.full_tensor() if is_dtensor(x) else x
