"""DTensors and their checkpoints, which take half a second to import: not before they are used."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MODULE = "torch.distributed.tensor"


def dtensors() -> Any:
    """The module `torch.distributed.tensor`."""
    return importlib.import_module(_MODULE)


def dtensor_states() -> Any:
    """The module `torch.distributed.checkpoint.state_dict`."""
    return importlib.import_module("torch.distributed.checkpoint.state_dict")


def is_dtensor(x: Any) -> TypeGuard[DTensor]:
    """Whether it is a DTensor."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(x, module.DTensor)
