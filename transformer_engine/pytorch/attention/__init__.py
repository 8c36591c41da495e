"""Attention: the core (DotProductAttention), and the layer around it (MultiheadAttention)."""

from transformer_engine.pytorch.attention.backends.choice import BackendTable, attention_backends
from transformer_engine.pytorch.attention.cache.inference import InferenceParams
from transformer_engine.pytorch.attention.core.layout import _get_qkv_layout
from transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention
from transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention
from transformer_engine.pytorch.attention.rope import (
    RotaryPositionEmbedding,
    apply_fused_qkv_rotary_pos_emb,
    apply_rotary_pos_emb,
)

__all__ = [
    "BackendTable",
    "DotProductAttention",
    "InferenceParams",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "_get_qkv_layout",
    "apply_fused_qkv_rotary_pos_emb",
    "apply_rotary_pos_emb",
    "attention_backends",
]
