"""What the two attentions of a decoder layer are called with."""

from __future__ import annotations

from typing import Any

from transformer_engine.pytorch.layers.checks import SEQUENCES


def arguments_of_decoder(
    core: dict[str, Any], **of_masks: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of self-attention and of cross-attention.

    Lengths of keys are those of the encoder output, so self-attention has those of its queries for
    both. Without a cache, that is: its keys are then the cached tokens. A mask of cross-attention
    is in place of lengths.

    Args:
        core: arguments of the layer that differ from their defaults.
        of_masks: those of cross-attention alone; None stands for the default.
    """
    masked = of_masks["attention_mask"] is not None
    shared = {
        name: value
        for name, value in core.items()
        if name not in of_masks and not (masked and name in SEQUENCES)
    }
    cross = {**shared, **{name: value for name, value in of_masks.items() if value is not None}}
    if "inference_params" in core:
        return core, cross
    own = {name: core.get(name.replace("_kv", "_q"), value) for name, value in core.items()}
    if "cu_seqlens_q" in core:  # else attention says which lengths are missing
        own = {name: x for name, x in own.items() if name.replace("_kv", "_q") in core}
    return own, cross
