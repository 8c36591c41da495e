"""Attention: the core (DotProductAttention)."""

from transformer_engine.pytorch.attention.choice import Problem, attention_backends
from transformer_engine.pytorch.attention.dot_product import DotProductAttention

__all__ = ["DotProductAttention", "Problem", "attention_backends"]
