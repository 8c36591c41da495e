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
    GLU,
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
from transformer_engine.pytorch.ops.collectives import AllGather, AllReduce, ReduceScatter
from transformer_engine.pytorch.ops.extra_tensors import AddExtraInput, MakeExtraOutput
from transformer_engine.pytorch.ops.grouped_linear import GroupedLinear
from transformer_engine.pytorch.ops.linear import BasicLinear, Bias, Linear
from transformer_engine.pytorch.ops.norm import L2Normalization, LayerNorm, RMSNorm
from transformer_engine.pytorch.ops.operation import FusibleOperation, Sequential
from transformer_engine.pytorch.ops.plain import ConstantScale, Dropout, Identity, Reshape
from transformer_engine.pytorch.ops.quantize import Quantize
from transformer_engine.pytorch.ops.scaled_activation import (
    ScaledClampedQGeGLU,
    ScaledSReLU,
    ScaledSwiGLU,
)

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "FusibleOperation",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSwiGLU",
    "Sequential",
    "SiLU",
    "SwiGLU",
]
