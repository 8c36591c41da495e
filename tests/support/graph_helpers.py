"""A small TransformerLayer, its inputs, and a capture function for the tests of CUDA graphs."""

from collections.abc import Callable
from typing import Any

import precisions
import torch
from torch import nn

import transformer_engine.pytorch as te

RECIPES = {name: precisions.RECIPES[name] for name in ("delayed", "current", "high precision")}
HIDDEN, BATCH, STEPS = 64, 4, 10


def captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Captures a step after three eager ones; returns the graph and the output of its replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = step()
    return graph, out


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
