"""Checks of those arguments of DotProductAttention that are independent of mask and backend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from transformer_engine.pytorch.attention.core.call import (
    AttentionMask,
    Bias,
    CallArguments,
    bias_of,
    sequences_of,
)
from transformer_engine.pytorch.attention.core.casts import asks
from transformer_engine.pytorch.attention.masks.alibi import default_slopes
from transformer_engine.pytorch.attention.masks.masks import Window, as_window
from transformer_engine.pytorch.dtypes import HIGH_PRECISION, autocast_dtype
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.fp8.exporting import refuse, refuse_training
from transformer_engine.pytorch.module.arguments import (
    check_keywords,
    check_numbers,
    check_sizes,
    in_layer,
    refuse_others,
)
from transformer_engine.pytorch.module.inputs import check_tensors, refuse_dtype
from transformer_engine.pytorch.parallel.groups import TensorParallel

if TYPE_CHECKING:
    from transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention

# Keywords of newer versions of `forward`, with the only value that is implemented.
LATER = {
    "fp8_output": False,
    "bf16_backward": False,
    "score_mod": None,
    "score_mod_bprop": None,
    "score_mod_tensors": None,
    "score_mod_bprop_tensors": None,
}

_Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_Tensor, _dense = torch.Tensor, torch.strided  # looked up once: every call uses them


def check_heads(
    layer: str | None, heads: int, groups: int | None, channels: int | tuple[int, int]
) -> tuple[int, tuple[int, int]]:
    """The number of key and value heads, and the sizes of a head of keys and of values."""
    groups = heads if groups is None else groups
    pair = channels if isinstance(channels, tuple | list) else (channels, channels)
    sizes = {"num_attention_heads": heads, "num_gqa_groups": groups}
    check_sizes("DotProductAttention", layer, 1, **sizes)
    if len(pair) != 2:
        raise ValueError(
            "[DotProductAttention] expected kv_channels of one size, or of those of a key and a"
            f" value, got {channels}{in_layer(layer)}"
        )
    for channel in pair:
        check_sizes("DotProductAttention", layer, 1, kv_channels=channel)
    if heads % groups:
        raise ValueError(
            f"[DotProductAttention] expected num_attention_heads divisible by num_gqa_groups,"
            f" {heads} is not divisible by {groups}{in_layer(layer)}"
        )
    return groups, pair


def check_settings(
    layer: str, attention_type: str, attention_dropout: float, softmax_scale: float | None
) -> None:
    """Check the constructor's arguments other than sizes and masks."""
    if attention_type not in ("self", "cross"):
        raise ValueError(
            f"[DotProductAttention] expected attention_type 'self' or 'cross',"
            f" got {attention_type!r} (layer {layer})"
        )
    scale = 1.0 if softmax_scale is None else softmax_scale
    factors = {"attention_dropout": attention_dropout, "softmax_scale": scale}
    check_numbers("DotProductAttention", layer, **factors)
    if not 0.0 <= attention_dropout <= 1.0:
        raise ValueError(
            f"[DotProductAttention] expected attention_dropout in [0, 1], got"
            f" {attention_dropout} (layer {layer})"
        )
    if not 0.0 < scale < math.inf:  # kernels multiply masked scores, which are -inf, with it
        raise ValueError(
            f"[DotProductAttention] expected softmax_scale > 0 and finite, got {scale} (layer"
            f" {layer})"
        )


def checked_inputs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> _Inputs:
    """Check that all have one supported dtype; inside torch.autocast, cast them to its dtype."""
    if not (
        isinstance(query, _Tensor)
        and isinstance(key, _Tensor)
        and isinstance(value, _Tensor)
        and query.layout is key.layout is value.layout is _dense
    ):
        check_tensors("DotProductAttention", query_layer=query, key_layer=key, value_layer=value)
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            "[DotProductAttention] expected query_layer, key_layer and value_layer of one"
            f" dtype, got {query.dtype}, {key.dtype} and {value.dtype}"
        )
    dtype = autocast_dtype(query)
    if dtype is not None:
        return query.to(dtype), key.to(dtype), value.to(dtype)
    if query.dtype not in HIGH_PRECISION:
        refuse_dtype("DotProductAttention", "query_layer", query.dtype, None)
    return query, key, value


def arguments_of(
    module: DotProductAttention,
    attention_mask: AttentionMask | None,
    *,
    qkv_format: str | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    attn_mask_type: str | None = None,
    window_size: Window | None = None,
    checkpoint_core_attention: bool = False,
    core_attention_bias_type: str = "no_bias",
    core_attention_bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bottom_right_diagonal: bool | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    **without_effect: Any,
) -> CallArguments:
    """The arguments of `DotProductAttention.forward`; for None, the module's settings."""
    return CallArguments(
        attention_mask,
        module.qkv_format if qkv_format is None else qkv_format,
        sequences_of(cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q),
        sequences_of(cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv),
        module.attn_mask_type if attn_mask_type is None else attn_mask_type,
        module.window_size if window_size is None else as_window(window_size),
        module.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal,
        bias_of(core_attention_bias_type, core_attention_bias, alibi_slopes),
        checkpoint_core_attention,
    )


def bias_of_rank(bias: Bias, heads: int, ranks: TensorParallel, device: torch.device) -> Bias:
    """The bias for the heads of this rank: ALiBi's default slopes are chosen for these heads."""
    if ranks.size == 1 or bias.type != "alibi" or bias.slopes is not None:
        return bias
    ranks.check()
    assert ranks.rank is not None
    own = default_slopes(heads, device).flatten().chunk(ranks.size)[ranks.rank]
    return bias._replace(slopes=own.contiguous())


def check_later(module: DotProductAttention, keywords: Mapping[str, Any]) -> None:
    """Raise unless all keywords are those of `LATER`, with the values there."""
    check_keywords(type(module).forward, keywords, LATER)
    refuse_others("DotProductAttention", module.name, keywords, LATER)


def refuse_in_export(module: DotProductAttention, qkv_format: str, inference_params: Any) -> None:
    """Refuse calls that ONNX export cannot express."""
    if asks(autocast_stack().scope, module.name):
        refuse("FP8 attention", "use a recipe without fp8_dpa and fp8_mha", module.name)
    if qkv_format == "thd":
        refuse("qkv_format 'thd'", "pad the sequences and use 'bshd' or 'sbhd'", module.name)
    if inference_params is not None:
        refuse("inference_params", "its cache is no part of a graph; leave it out", module.name)
    if module.context is not None:
        refuse("cp_group", "attend to whole sequences in one process", module.name)
    dropped = {"attention_dropout": module.attention_dropout}
    refuse_training(module.training, dropped, module.name)
