"""What the tests of checkpointing share."""

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te

MODES = {
    "te": lambda f, *a: te.checkpoint(f, *a, use_reentrant=True),
    "te not reentrant": lambda f, *a: te.checkpoint(f, *a, use_reentrant=False),
    "torch": lambda f, *a: torch_checkpoint(f, *a, use_reentrant=True),
    "torch not reentrant": lambda f, *a: torch_checkpoint(f, *a, use_reentrant=False),
}
NONE = lambda f, *a: f(*a)  # noqa: E731
Wrap = Callable[..., Any]
