"""Rotary position embedding: its angles and the rotation."""

from transformer_engine.pytorch.attention.rope.angles import RotaryPositionEmbedding
from transformer_engine.pytorch.attention.rope.embedding import apply_rotary_pos_emb
from transformer_engine.pytorch.attention.rope.packed import apply_fused_qkv_rotary_pos_emb

__all__ = ["RotaryPositionEmbedding", "apply_fused_qkv_rotary_pos_emb", "apply_rotary_pos_emb"]
