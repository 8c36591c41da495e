"""The documented import path of `LayerNormMLP`."""

from transformer_engine.pytorch.modules.layernorm_mlp import LayerNormMLP

__all__ = ["LayerNormMLP"]
