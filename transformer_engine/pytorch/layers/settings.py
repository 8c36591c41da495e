"""Attributes of TransformerLayer that may be set after construction, and those that may not."""

from __future__ import annotations

from typing import Any

from transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention
from transformer_engine.pytorch.attention.masks.masks import mask_type
from transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention
from transformer_engine.pytorch.layers.drop_path import DropPath
from transformer_engine.pytorch.module.arguments import check_numbers, in_layer
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from transformer_engine.pytorch.module.norms import NormModule
from transformer_engine.pytorch.module.settings import HasSettings, flag_setting, setting


def _checked_mask_type(layer: Any, kind: str) -> str:
    mask_type(kind, "self_attn_mask_type")
    return kind


def _checked_rate(layer: Any, rate: float) -> float:
    name = getattr(layer, "name", None)
    check_numbers("TransformerLayer", name, drop_path_rate=rate)
    if not 0.0 <= rate <= 1.0:
        raise ValueError(
            f"[TransformerLayer] expected 0 <= drop_path_rate <= 1, got {rate}{in_layer(name)}"
        )
    return rate


def _set_mask_type(layer: Any, kind: str) -> None:
    if isinstance(layer.self_attention, MultiheadAttention):
        layer.self_attention.core_attention.attn_mask_type = kind


def _set_rate(layer: Any, rate: float) -> None:
    if isinstance(layer.drop_path, DropPath):
        layer.drop_path.drop_prob = rate


def _set_sequence_parallel(layer: Any, on: bool) -> None:
    for block in layer.children():
        ours = isinstance(block, MultiheadAttention | LayerNormMLP)
        for part in block.modules() if ours else ():
            if isinstance(part, TransformerEngineBaseModule | DotProductAttention):
                part.sequence_parallel = on
        if isinstance(block, NormModule):
            block._parameter_set.mark(block, "sequence_parallel", on)


class LayerSettings(HasSettings):
    """Base of TransformerLayer: passes changed settings on to the blocks of the layer.

    Blocks of other classes, which users have put in place of ours, do not get them.

    Attributes:
        drop_path_rate: probability of leaving out a sample's attention or MLP block in training.
        self_attn_mask_type: mask type of self-attention, for calls that give none.
        sequence_parallel: each rank has a part of the tokens, see `TransformerLayer`.
    """

    drop_path_rate: float = setting(_checked_rate, _set_rate)
    self_attn_mask_type: str = setting(_checked_mask_type, _set_mask_type)
    sequence_parallel: bool = flag_setting(apply=_set_sequence_parallel)

    def is_built(self) -> bool:
        """Whether all blocks have been made."""
        return "layernorm_mlp" in self.__dict__.get("_modules", ())

    def fixed_settings(self) -> tuple[str, ...]:
        """See `HasSettings`; these decide how the blocks are built."""
        return (
            "apply_residual_connection_post_layernorm",
            "attn_input_format",
            "layer_type",
            "output_layernorm",
            "parallel_attention_mlp",
        )
