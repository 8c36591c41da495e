"""The documented import path of `MultiheadAttention`."""

from transformer_engine.pytorch.attention.multi_head import MultiheadAttention

__all__ = ["MultiheadAttention"]
