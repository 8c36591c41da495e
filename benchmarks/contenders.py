"""What the benchmarks of modules compare: layers in plain torch and ours, and the FP8 recipes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU, to test benchmarks
DTYPE = torch.bfloat16
FACTORY = {"device": DEVICE, "dtype": DTYPE}

RECIPES = {
    "bf16": None,
    "fp8 delayed": DelayedScaling(amax_history_len=16),
    "fp8 current": Float8CurrentScaling(),
    "fp8 blocks": Float8BlockScaling(),
}


def precision(name: str, group: Any = None) -> AbstractContextManager[None]:
    """The `fp8_autocast` of a recipe, with a group for amaxes; "torch" and "bf16" have none."""
    recipe = RECIPES.get(name)
    if recipe is None:
        return nullcontext()
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=group)


@dataclass(frozen=True)
class Size:
    """The sizes of a transformer layer and of its input."""

    hidden: int
    ffn: int
    heads: int
    sequence: int
    batch: int

    def __str__(self) -> str:
        return f"h{self.hidden} f{self.ffn} s{self.sequence} b{self.batch}"


class PlainMLP(nn.Module):
    """Norm, FC1, GELU, FC2."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden, **FACTORY)
        self.fc1 = nn.Linear(hidden, ffn, **FACTORY)
        self.fc2 = nn.Linear(ffn, hidden, **FACTORY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(self.norm(x)), approximate="tanh"))


class PlainLayer(nn.Module):
    """A layer in plain torch: `[batch, sequence, hidden]`, pre-norm, causal, no dropout."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm = nn.LayerNorm(size.hidden, **FACTORY)
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, **FACTORY)
        self.proj = nn.Linear(size.hidden, size.hidden, **FACTORY)
        self.mlp = PlainMLP(size.hidden, size.ffn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(context.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def our_layer(size: Size, **arguments: Any) -> nn.Module:
    """Our layer with the same computation as `PlainLayer`."""
    return te.TransformerLayer(
        size.hidden,
        size.ffn,
        size.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        params_dtype=DTYPE,
        device=DEVICE,
        **{"attn_input_format": "bshd", **arguments},
    )


def our_mlp(hidden: int, ffn: int, **arguments: str) -> nn.Module:
    """Our MLP with the same computation as `PlainMLP`."""
    return te.LayerNormMLP(hidden, ffn, params_dtype=DTYPE, device=DEVICE, **arguments)


def random(*shape: int) -> torch.Tensor:
    """A random input or gradient."""
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def step(module: nn.Module, x: torch.Tensor, name: str, group: Any = None) -> Callable[[], None]:
    """A forward and backward; gradients are dropped before, as after an optimizer step."""
    x = x.detach().requires_grad_()
    leaves = [x, *module.parameters()]
    upstream = torch.randn_like(x)

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        with precision(name, group):
            y = module(x)
        y.backward(upstream)

    return run
