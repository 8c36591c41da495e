"""Attention: the core (DotProductAttention), and the layer around it (MultiheadAttention)."""

from transformer_engine.pytorch.attention.dot_product import DotProductAttention
from transformer_engine.pytorch.attention.inference import InferenceParams
from transformer_engine.pytorch.attention.layout import _get_qkv_layout
from transformer_engine.pytorch.attention.multi_head import MultiheadAttention
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb
from transformer_engine.pytorch.attention.table import BackendTable, attention_backends

__all__ = [
    "BackendTable",
    "DotProductAttention",
    "InferenceParams",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "_get_qkv_layout",
    "apply_rotary_pos_emb",
    "attention_backends",
]
