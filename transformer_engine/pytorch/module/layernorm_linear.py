"""The documented import path of `LayerNormLinear`."""

from transformer_engine.pytorch.modules.layernorm_linear import LayerNormLinear

__all__ = ["LayerNormLinear"]
