"""Attention: the core (DotProductAttention), and the layer around it (MultiheadAttention)."""

from transformer_engine.pytorch.attention.choice import Problem, attention_backends
from transformer_engine.pytorch.attention.dot_product import DotProductAttention
from transformer_engine.pytorch.attention.inference import InferenceParams
from transformer_engine.pytorch.attention.layout import _get_qkv_layout
from transformer_engine.pytorch.attention.multi_head import MultiheadAttention

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "MultiheadAttention",
    "Problem",
    "_get_qkv_layout",
    "attention_backends",
]
