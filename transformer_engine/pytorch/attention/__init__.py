"""Attention: the core (DotProductAttention), and the layer around it (MultiheadAttention)."""

from transformer_engine.pytorch.attention.dot_product import DotProductAttention
from transformer_engine.pytorch.attention.inference import InferenceParams
from transformer_engine.pytorch.attention.layout import _get_qkv_layout
from transformer_engine.pytorch.attention.multi_head import MultiheadAttention
from transformer_engine.pytorch.attention.table import BackendTable, attention_backends

__all__ = [
    "BackendTable",
    "DotProductAttention",
    "InferenceParams",
    "MultiheadAttention",
    "_get_qkv_layout",
    "attention_backends",
]
