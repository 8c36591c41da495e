"""`get_attention_backend`: the choice of a backend, in the terms of NVIDIA's package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch.torch_version import TorchVersion

from transformer_engine._env import attention_variables
from transformer_engine.pytorch.attention.backends import flash2, flash3, flash4
from transformer_engine.pytorch.attention.backends.choice import attention_backends
from transformer_engine.pytorch.attention.cache.generation import mask_type_of_fixed_steps
from transformer_engine.pytorch.attention.cache.inference import InferenceParams
from transformer_engine.pytorch.attention.core.casts import wants_fp8
from transformer_engine.pytorch.attention.core.formats import FORMATS
from transformer_engine.pytorch.attention.masks.masks import NO_WINDOW, as_window, bottom_right
from transformer_engine.pytorch.fp8.recipes.base import find_rules
from transformer_engine.pytorch.module.arguments import check_dtypes, refuse_others

_OP = "get_attention_backend"
_FLASH = {"flash4": flash4.SOURCE, "flash3": flash3.SOURCE, "flash2": flash2.SOURCE}
_CODES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
_ONLY = {
    "qkv_type": torch.Tensor,
    "fp8_output": False,
    "has_score_mod": False,
    "has_score_mod_bprop": False,
}
_SCORE_BIASES = ("pre_scale_bias", "post_scale_bias")

# Programs for NVIDIA's package set this after they have changed a variable such as NVTE_FUSED_ATTN.
# Here every call reads the variables, so nothing reads it.
_attention_backends = {"backend_selection_requires_update": False}

Answer = tuple[
    bool, TorchVersion | None, bool, "FusedAttnBackend | None", bool, list[bool]
]  # see `get_attention_backend`


class FusedAttnBackend(IntEnum):
    """The backends of FusedAttention, by the numbers of `NVTE_FUSED_ATTN_BACKEND`.

    `F16_max512_seqlen` is never chosen: `F16_arbitrary_seqlen` takes all its calls.
    """

    F16_max512_seqlen = 0
    F16_arbitrary_seqlen = 1
    FP8 = 2


@dataclass
class AttentionParams:
    """A call of attention on one rank, for `get_attention_backend`.

    Attributes:
        qkv_type: `torch.Tensor`, the only class that attention takes.
        qkv_dtype: of queries, keys and values. With `fp8` also a dtype of FP8 codes, which stands
            for bf16, because attention itself casts to FP8.
        qkv_layout: such as `sbhd_sbhd_sbhd` or `bs3hd`. Only the format of queries matters, because
            backends take views.
        batch_size: number of sequences. Without effect for `thd`.
        num_heads: number of query heads.
        num_gqa_groups: number of key and value heads.
        max_seqlen_q: tokens of the longest query sequence.
        max_seqlen_kv: tokens of the longest key sequence.
        head_dim_qk: size of a head of queries and keys.
        head_dim_v: size of a head of values.
        attn_mask_type: see `DotProductAttention`. Padding is given by `cu_seqlens`.
        window_size: `(left, right)`; None for no window.
        bottom_right_diagonal: align windows of non-causal mask types bottom-right.
        alibi_slopes_shape: shape of slopes that are given; None for ALiBi's default ones.
        core_attention_bias_type: `no_bias`, `pre_scale_bias`, `post_scale_bias` or `alibi`.
        core_attention_bias_shape: four sizes, or `1hss`, `b1ss`, `bhss`, `11ss` or `111s`. Read for
            a pre-scale or post-scale bias.
        core_attention_bias_requires_grad: the bias needs a gradient; read as the shape is.
        pad_between_seqs: without effect: backends that take padding take it between sequences, too.
        attention_dropout: probability of dropping an attention weight; read with `is_training`.
        context_parallel: ranks share sequences.
        cp_comm_type: how they communicate, see `DotProductAttention`.
        cp_size: without effect: other fields describe the part of one rank.
        deterministic: gradients must repeat bit for bit; False is what the environment and torch's
            switch ask for.
        is_training: a backward will follow.
        fp8: inside of an FP8 region.
        fp8_meta: has `recipe`, whose `fp8_dpa` and `fp8_mha` say whether attention runs in
            FP8; None for a recipe that asks for it.
        inference_params: an `InferenceParams`; None without a cache.
        softmax_type: `vanilla`, `off-by-one` or `learnable`.
        return_max_logit: without effect: the largest scores are computed separately.
        cuda_graph: without effect: attention itself asks whether `set_capture_start` was called.
        num_splits: without effect, as in `DotProductAttention.forward`.
        fp8_output: False, the only value that is implemented.
        checkpoint_core_attention: without effect: every backend can compute attention again.
        has_score_mod: False, the only value that is implemented.
        has_score_mod_bprop: False, the only value that is implemented.
    """

    qkv_type: type[torch.Tensor] = torch.Tensor
    qkv_dtype: torch.dtype = torch.bfloat16
    qkv_layout: str = "sbh3d"
    batch_size: int = 1
    num_heads: int = 16
    num_gqa_groups: int = 16
    max_seqlen_q: int = 128
    max_seqlen_kv: int = 128
    head_dim_qk: int = 64
    head_dim_v: int = 64
    attn_mask_type: str = "no_mask"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool = True
    alibi_slopes_shape: Sequence[int] | None = None
    core_attention_bias_type: str = "no_bias"
    core_attention_bias_shape: str | Sequence[int] | None = "1hss"
    core_attention_bias_requires_grad: bool = True
    pad_between_seqs: bool = False
    attention_dropout: float = 0.0
    context_parallel: bool = False
    cp_comm_type: str = "p2p"
    cp_size: int = 1
    deterministic: bool = False
    is_training: bool = True
    fp8: bool = False
    fp8_meta: Mapping[str, Any] | None = None
    inference_params: InferenceParams | None = None
    softmax_type: str = "vanilla"
    return_max_logit: bool = False
    cuda_graph: bool = False
    num_splits: int = 1
    fp8_output: bool = False
    checkpoint_core_attention: bool = False
    has_score_mod: bool = False
    has_score_mod_bprop: bool = False


def get_attention_backend(attention_params: AttentionParams) -> Answer:
    """Which kind of backend runs a call; `attention_backends` gives the backends and the reasons.

    The call is on the GPU where there is one, else on the CPU. flash-attn is FlashAttention, and
    cuDNN is FusedAttention, as are torch's kernels (`sdpa`), which are FlashAttention if
    `NVTE_FUSED_ATTN=0` leaves only that.

    Args:
        attention_params: describes the call.

    Returns:
        `(use_flash, flash_version, use_fused, fused_backend, use_unfused, takes)`, where `takes` is
        `[flash, fused, unfused]`: the kinds that take the call. At most one of the three `use_*` is
        True. `flash_version` is the version of the flash-attn that takes the call, and
        `fused_backend` a `FusedAttnBackend`; both are None where none does. All are False or None
        for a recipe that asks for FP8 attention which is not implemented.

    Raises:
        ValueError: formats, masks, biases, kinds of softmax or of communication that do not exist;
            heads that do not fit together; `thd` without a padding mask.
        TypeError: dtypes, layouts, windows or caches that attention does not take.
        NotImplementedError: a value that is not implemented.

    Example:
        >>> params = AttentionParams(core_attention_bias_type="alibi", attn_mask_type="causal")
        >>> get_attention_backend(params)[-1][2]
        True
    """
    params = attention_params
    refuse_others(_OP, None, vars(params), _ONLY)
    taking = _backends_taking(params)
    flash = [name for name in taking if _is_flash(name)]
    fused = [name for name in taking if not _is_flash(name) and name != "unfused"]
    first = taking[0] if taking else None
    kind = FusedAttnBackend.FP8 if "cudnn_fp8" in fused else FusedAttnBackend.F16_arbitrary_seqlen
    return (
        first in flash,
        next((_FLASH[name].version for name in flash if name in _FLASH), None),
        first in fused,
        kind if fused else None,
        first == "unfused",
        [bool(flash), bool(fused), "unfused" in taking],
    )


def _is_flash(name: str) -> bool:
    return name in _FLASH or (name == "sdpa" and not attention_variables().fused)


def _backends_taking(params: AttentionParams) -> list[str]:
    """Names of the backends that take the call, the one that runs it first."""
    recipe = None if params.fp8_meta is None else params.fp8_meta.get("recipe")
    fp8 = params.fp8 and (recipe is None or wants_fp8(recipe))
    if fp8 and recipe is not None:
        rules = find_rules(recipe)
        if rules is None or not rules.fp8_attention:
            return []
    dtype = torch.bfloat16 if params.fp8 and params.qkv_dtype in _CODES else params.qkv_dtype
    check_dtypes(_OP, None, qkv_dtype=dtype)
    qkv_format, mask_type, cache = _format_of(params.qkv_layout), params.attn_mask_type, ""
    window, queries = as_window(params.window_size), params.max_seqlen_q
    if params.inference_params is not None:
        if not isinstance(params.inference_params, InferenceParams):
            raise TypeError(
                f"[{_OP}] expected inference_params of InferenceParams, got"
                f" {type(params.inference_params).__name__}"
            )
        cache, mask_type = params.inference_params.kind, bottom_right(mask_type)
        if cache == "fixed":
            mask_type = mask_type_of_fixed_steps(
                mask_type, queries, window not in (None, NO_WINDOW)
            )
        elif cache == "named":
            qkv_format = "bshd"  # the format of the cache
    has_bias = params.core_attention_bias_type in _SCORE_BIASES
    table = attention_backends(
        num_attention_heads=params.num_heads,
        kv_channels=(params.head_dim_qk, params.head_dim_v),
        num_gqa_groups=params.num_gqa_groups,
        attention_dropout=params.attention_dropout,
        qkv_format=qkv_format,
        attn_mask_type=mask_type,
        window_size=window,
        bottom_right_diagonal=params.bottom_right_diagonal or bool(cache),
        softmax_type=params.softmax_type,
        core_attention_bias_type=params.core_attention_bias_type,
        core_attention_bias_shape=_bias_shape(params) if has_bias else None,
        core_attention_bias_requires_grad=has_bias and params.core_attention_bias_requires_grad,
        alibi_slopes=params.alibi_slopes_shape is not None,
        batch_size=None if qkv_format == "thd" else params.batch_size,
        max_seqlen_q=queries,
        max_seqlen_kv=params.max_seqlen_kv,
        inference_params=cache,
        fp8=fp8,
        dtype=dtype,
        is_training=params.is_training,
        deterministic=params.deterministic or None,
        cp_comm_type=params.cp_comm_type if params.context_parallel else None,
    )
    return [name for name, reason in table.items() if reason is None]


def _format_of(layout: str) -> str:
    """The format of queries in a layout, such as `sbhd` in `sbhd_sb2hd`."""
    if not isinstance(layout, str):
        raise TypeError(f"[{_OP}] expected qkv_layout to be a str, got {layout!r}")
    parts = layout.removeprefix("paged_kv_").split("_")
    formats = ["".join(filter(str.isalpha, part)) for part in parts]
    if not {*formats} <= {*FORMATS}:
        raise ValueError(
            f"[{_OP}] expected qkv_layout of the formats {', '.join(FORMATS)}, such as"
            f" 'sbhd_sbhd_sbhd' or 'bs3hd', got {layout!r}"
        )
    return formats[0]


def _bias_shape(params: AttentionParams) -> tuple[int, ...] | None:
    shape = params.core_attention_bias_shape
    if not isinstance(shape, str):
        return None if shape is None else tuple(shape)
    queries, keys = params.max_seqlen_q, params.max_seqlen_kv
    batch, heads = params.batch_size, params.num_heads
    named = {
        "1hss": (1, heads, queries, keys),
        "b1ss": (batch, 1, queries, keys),
        "bhss": (batch, heads, queries, keys),
        "11ss": (1, 1, queries, keys),
        "111s": (1, 1, 1, keys),
    }
    if shape not in named:
        raise ValueError(
            f"[{_OP}] expected core_attention_bias_shape of four sizes, or in"
            f" {{{', '.join(named)}}}, got {shape!r}"
        )
    return named[shape]
