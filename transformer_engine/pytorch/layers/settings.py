"""Attributes of TransformerLayer that may be set after construction, and those that may not."""

from __future__ import annotations

from typing import Any

from transformer_engine.pytorch.attention.masks.masks import mask_type
from transformer_engine.pytorch.module.settings import HasSettings, setting


def _checked_mask_type(layer: Any, kind: str) -> str:
    mask_type(kind, "self_attn_mask_type")
    return kind


class LayerSettings(HasSettings):
    """Base of TransformerLayer.

    Attributes:
        self_attn_mask_type: of self-attention, for calls that name none.
    """

    self_attention: Any
    self_attn_mask_type: str = setting(_checked_mask_type)

    def is_built(self) -> bool:
        """Whether there are all blocks."""
        return "layernorm_mlp" in self.__dict__.get("_modules", ())

    def rebuild_chain(self) -> None:
        """Give self-attention the type of its mask."""
        self.self_attention.core_attention.attn_mask_type = self.self_attn_mask_type

    def fixed_settings(self) -> tuple[str, ...]:
        """See `HasSettings`; blocks are built for them."""
        return (
            "apply_residual_connection_post_layernorm",
            "attn_input_format",
            "layer_type",
            "output_layernorm",
            "parallel_attention_mlp",
        )
