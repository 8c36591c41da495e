"""The documented import path of `DotProductAttention`."""

from transformer_engine.pytorch.attention.dot_product import DotProductAttention

__all__ = ["DotProductAttention"]
