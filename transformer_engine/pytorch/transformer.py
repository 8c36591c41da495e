"""The documented import path of `TransformerLayer`."""

from transformer_engine.pytorch.modules.transformer_layer import TransformerLayer

__all__ = ["TransformerLayer"]
