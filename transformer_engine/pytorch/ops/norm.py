"""Norms as operations."""

from transformer_engine.pytorch.module.layernorm import LayerNorm as _LayerNorm
from transformer_engine.pytorch.module.rmsnorm import RMSNorm as _RMSNorm
from transformer_engine.pytorch.ops.operation import FusibleOperation


class LayerNorm(_LayerNorm, FusibleOperation):
    """`transformer_engine.pytorch.LayerNorm`, as an operation."""


class RMSNorm(_RMSNorm, FusibleOperation):
    """`transformer_engine.pytorch.RMSNorm`, as an operation."""
