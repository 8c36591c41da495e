"""The documented import path of the modules; they are defined in `modules`."""

from transformer_engine.pytorch.module import (
    base,
    grouped_linear,
    layernorm,
    layernorm_linear,
    layernorm_mlp,
    linear,
    rmsnorm,
)
from transformer_engine.pytorch.modules.grouped_linear import GroupedLinear
from transformer_engine.pytorch.modules.layernorm import LayerNorm
from transformer_engine.pytorch.modules.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.modules.layernorm_mlp import LayerNormMLP
from transformer_engine.pytorch.modules.linear import Linear
from transformer_engine.pytorch.modules.rmsnorm import RMSNorm

__all__ = [
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "base",
    "grouped_linear",
    "layernorm",
    "layernorm_linear",
    "layernorm_mlp",
    "linear",
    "rmsnorm",
]
