"""Operations as modules, and `Sequential` to run them one after another.

>>> import torch
>>> mlp = Sequential(
...     LayerNorm(16, device="cpu"),
...     BasicLinear(16, 64, device="cpu"),
...     GELU(),
...     BasicLinear(64, 16, device="cpu"),
...     Bias(16, device="cpu"),
... )
>>> mlp(torch.ones(4, 16)).shape
torch.Size([4, 16])
"""

from transformer_engine.pytorch.ops.activation import (
    GEGLU,
    GELU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    SiLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from transformer_engine.pytorch.ops.linear import BasicLinear, Bias
from transformer_engine.pytorch.ops.norm import LayerNorm, RMSNorm
from transformer_engine.pytorch.ops.operation import FusibleOperation, Sequential

__all__ = [
    "GEGLU",
    "GELU",
    "QGEGLU",
    "QGELU",
    "BasicLinear",
    "Bias",
    "ClampedSwiGLU",
    "FusibleOperation",
    "LayerNorm",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "SReGLU",
    "SReLU",
    "Sequential",
    "SiLU",
    "SwiGLU",
]
