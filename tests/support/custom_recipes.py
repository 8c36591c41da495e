"""Recipes whose function chooses quantizers, and a training step of a module under one."""

from functools import partial
from typing import Any

import torch
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2
Current, Delayed = te.Float8CurrentScalingQuantizer, te.Float8Quantizer
Blocks = partial(te.Float8BlockQuantizer, rowwise=True, columnwise=True)


def as_current(role: te.QuantizerRole) -> Any:
    """The quantizers of `Float8CurrentScaling`."""
    return Current(E5M2 if role.tensor_type == "grad_output" else E4M3)


def as_blocks(role: te.QuantizerRole) -> Any:
    """The quantizers of `Float8BlockScaling`."""
    return Blocks(E4M3, block_scaling_dim=2 if role.tensor_type == "weight" else 1)


def choosing(**made: Any) -> CustomRecipe:
    """Returns a recipe that chooses by the type of the tensor."""
    return CustomRecipe(lambda role: made.get(role.tensor_type))


MODULES = {
    "linear": lambda device: te.Linear(64, 128, device=device, name="fc"),
    "norm linear": lambda device: te.LayerNormLinear(64, 128, device=device),
    "mlp": lambda device: te.LayerNormMLP(64, 128, device=device),
    "layer": lambda device: te.TransformerLayer(
        64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, device=device
    ),
    "grouped": lambda device: te.GroupedLinear(2, 64, 128, device=device),
}


def run(module: nn.Module, recipe: Any, call: Any = None, seed: int = 0) -> list[torch.Tensor]:
    """Returns the output of a step, and the gradients of the input and the parameters."""
    torch.manual_seed(seed)
    device = next(module.parameters()).device
    x = torch.randn(32, 2, 64, device=device, requires_grad=True)
    module.zero_grad()
    splits = ([48, 16],) if isinstance(module, te.GroupedLinear) else ()
    with te.autocast(recipe=recipe):
        y = (module if call is None else call)(x.flatten(0, 1) if splits else x, *splits)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]
