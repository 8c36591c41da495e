"""The arguments of self-attention and of cross-attention in a decoder layer."""

from __future__ import annotations

from typing import Any

from transformer_engine.pytorch.layers.checks import SEQUENCES


def arguments_of_decoder(
    core: dict[str, Any], **of_masks: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of self-attention and of cross-attention.

    Lengths of keys (`..._kv`) are those of the encoder output, so self-attention gets the lengths
    of its queries (`..._q`) for its keys, too. With `inference_params` it gets both as they are,
    because its keys are the cached tokens. If cross-attention has a mask, it gets no lengths.

    Args:
        core: arguments of the layer that differ from their defaults.
        of_masks: arguments of cross-attention only; None stands for the default.
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
