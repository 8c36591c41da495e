"""The documented import path of rotary position embeddings."""

from transformer_engine.pytorch.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

__all__ = ["RotaryPositionEmbedding", "apply_rotary_pos_emb"]
