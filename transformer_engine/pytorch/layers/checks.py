"""Checks of the arguments of TransformerLayer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from transformer_engine.pytorch.attention.core.call import AttentionMask
from transformer_engine.pytorch.attention.masks.masks import check_mask_dtype, mask_type
from transformer_engine.pytorch.fp8.exporting import exporting, refuse_training
from transformer_engine.pytorch.module.arguments import check_numbers, check_sizes
from transformer_engine.pytorch.module.inputs import check_hidden

if TYPE_CHECKING:
    from transformer_engine.pytorch.layers.transformer_layer import TransformerLayer

BATCH_DIM = {"sbhd": 1, "bshd": 0, "thd": 0}
SEQUENCES = (  # keywords that `forward` hands on to attention
    *("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    *("max_seqlen_q", "max_seqlen_kv", "pad_between_seqs"),
)


def check_layer(layer: TransformerLayer, ffn_hidden_size: int, fuses_only_wgrad: bool) -> None:
    """Check the constructor's arguments, but for those that children check."""
    kind, name = "TransformerLayer", layer.name
    check_sizes(kind, name, hidden_size=layer.hidden_size, ffn_hidden_size=ffn_hidden_size)
    check_numbers(kind, name, hidden_dropout=layer.hidden_dropout)
    if layer.enc_dec_attn_mask_type is not None:
        mask_type(layer.enc_dec_attn_mask_type, "enc_dec_attn_mask_type")
    if layer.layer_type not in ("encoder", "decoder"):
        raise ValueError(
            f"[TransformerLayer] expected layer_type 'encoder' or 'decoder',"
            f" got {layer.layer_type!r}"
        )
    if layer.attn_input_format not in BATCH_DIM:
        raise ValueError(
            f"[TransformerLayer] expected attn_input_format in {{{', '.join(BATCH_DIM)}}},"
            f" got {layer.attn_input_format!r}"
        )
    if not 0.0 <= layer.hidden_dropout < 1.0:
        raise ValueError(
            f"[TransformerLayer] expected 0 <= hidden_dropout < 1, got {layer.hidden_dropout}"
        )
    if fuses_only_wgrad:
        raise ValueError(
            "[TransformerLayer] expected fuse_qkv_params=True with fuse_wgrad_accumulation=True,"
            " got False"
        )
    _check_parallel_mlp(layer)


def _check_parallel_mlp(layer: TransformerLayer) -> None:
    if not layer.parallel_attention_mlp:
        return
    refused = {
        "apply_residual_connection_post_layernorm=True": (
            layer.apply_residual_connection_post_layernorm
        ),
        "output_layernorm=True": layer.output_layernorm,
        "layer_type='decoder'": layer.layer_type == "decoder",
    }
    for argument, enabled in refused.items():
        if enabled:
            raise ValueError(
                f"[TransformerLayer] expected parallel_attention_mlp=True without {argument},"
                " got both"
            )


def check_inputs(
    layer: TransformerLayer,
    hidden_states: torch.Tensor,
    encoder_output: torch.Tensor | None,
    mask: AttentionMask | None,
    kind: str | None,
) -> None:
    """Check the arguments of `forward`."""
    format = layer.attn_input_format
    check_hidden(layer, "hidden_states", hidden_states, layer.hidden_size, format)
    if encoder_output is not None:
        check_hidden(layer, "encoder_output", encoder_output, layer.hidden_size, format)
    elif layer.layer_type == "decoder":
        raise ValueError(
            "[TransformerLayer] expected encoder_output, as layer_type is 'decoder', got None"
        )
    ranks = layer.layernorm_mlp.ranks.size
    if layer.sequence_parallel and layer.seq_length not in (None, hidden_states.shape[0] * ranks):
        raise ValueError(
            f"[TransformerLayer] expected hidden_states of sequence length "
            f"{layer.seq_length / ranks:g}, got {hidden_states.shape[0]}"
        )
    check_mask(mask, kind or layer.self_attn_mask_type, "attention_mask", "self_attn_mask_type")
    check_export(layer)


def check_export(layer: TransformerLayer) -> None:
    """Check that a graph of ONNX can hold the layer, where it is traced for one."""
    if exporting():
        dropped = {"hidden_dropout": layer.hidden_dropout, "drop_path_rate": layer.drop_path_rate}
        refuse_training(layer.training, dropped, layer.name)


def check_mask(mask: AttentionMask | None, kind: str, parameter: str, kind_parameter: str) -> None:
    """Check a mask type, and the dtype of the mask where the type uses it."""
    described = mask_type(kind, kind_parameter)
    if mask is not None and not isinstance(mask, torch.Tensor | tuple | list):
        raise TypeError(
            f"[TransformerLayer] expected {parameter} to be a tensor or a pair of tensors, got"
            f" {type(mask).__name__}"
        )
    if mask is not None and (described.padding or described.arbitrary):
        for part in mask if isinstance(mask, tuple | list) else (mask,):
            check_mask_dtype(part, parameter)
