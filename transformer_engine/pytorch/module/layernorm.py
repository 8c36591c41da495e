"""The documented import path of `LayerNorm`."""

from transformer_engine.pytorch.modules.layernorm import LayerNorm

__all__ = ["LayerNorm"]
