"""What the tests of checkpointing share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te

HIDDEN = 32

MODES = {
    "te": lambda f, *a: te.checkpoint(f, *a, use_reentrant=True),
    "te not reentrant": lambda f, *a: te.checkpoint(f, *a, use_reentrant=False),
    "torch": lambda f, *a: torch_checkpoint(f, *a, use_reentrant=True),
    "torch not reentrant": lambda f, *a: torch_checkpoint(f, *a, use_reentrant=False),
}
Wrap = Callable[..., Any]


def build(device: str, dropout: float = 0.0) -> nn.ModuleDict:
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": device, "params_dtype": torch.float32}
    probabilities = {"hidden_dropout": dropout, "attention_dropout": dropout}
    modules = {
        "linear": te.Linear(HIDDEN, HIDDEN, **options),
        "mlp": te.LayerNormMLP(HIDDEN, 64, **options),
        "layer": te.TransformerLayer(HIDDEN, 64, 2, **probabilities, **options),
    }
    return nn.ModuleDict(modules)


def uncheckpointed(function: Wrap, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def states(modules: nn.Module) -> list[torch.Tensor]:
    """Scales and histories, after what compiled code has put off."""
    with te.fp8_autocast():
        pass
    scaling = (state for m in modules.modules() for state in getattr(m, "scaling", {}).values())
    return [t.clone() for state in scaling for t in (state.scale, state.amax_history)]
