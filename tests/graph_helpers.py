"""What the tests of CUDA graphs share."""

from contextlib import nullcontext

import torch
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=3),
    "current": Float8CurrentScaling(),
    "high precision": None,
}
HIDDEN, BATCH, STEPS = 64, 4, 10


def scope(recipe: str):
    chosen = RECIPES[recipe]
    return nullcontext() if chosen is None else te.fp8_autocast(fp8_recipe=chosen)


def layer(number: int = 0, dropout: float = 0.0, **more) -> te.TransformerLayer:
    torch.manual_seed(number)
    return te.TransformerLayer(
        HIDDEN,
        128,
        4,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        params_dtype=torch.bfloat16,
        name=f"layer{number}",
        **more,
    )


def batch() -> torch.Tensor:
    return torch.randn(16, BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16)


def everything(model: nn.Module) -> list[torch.Tensor]:
    states = [s for m in model.modules() for s in getattr(m, "scaling", {}).values()]
    return [*model.parameters(), *(t for s in states for t in (s.scale, s.amax_history))]
