"""A step of generation: caches new keys and values, and gives attention those of all tokens."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from transformer_engine.pytorch.attention.cache.inference import InferenceParams
from transformer_engine.pytorch.attention.core import formats
from transformer_engine.pytorch.attention.core.call import CallArguments, Sequences
from transformer_engine.pytorch.attention.masks.masks import (
    NO_WINDOW,
    Window,
    as_window,
    bottom_right,
    mask_rule,
)
from transformer_engine.pytorch.attention.masks.masks import mask_type as known_mask_type
from transformer_engine.pytorch.module.inputs import can_read

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def check_params(params: object, layer_number: int | None, layer: Any) -> None:
    """Raise TypeError unless `params` is an `InferenceParams`, ValueError for another's cache."""
    if not isinstance(params, InferenceParams):
        raise TypeError(
            "[DotProductAttention] expected inference_params of InferenceParams, got"
            f" {type(params).__name__}"
        )
    number = _number_of(layer_number) if params.kind == "named" else layer_number
    params.claim(number, layer)


def _number_of(layer_number: int | None) -> int:
    """The number of a layer in a cache manager, which has no place for None."""
    return 1 if layer_number is None else layer_number


def check_cross(core: Any, mask_type: str | None, window: Window | None) -> None:
    """Raise ValueError if the mask of cross attention depends on the positions of queries.

    `mask_type` and `window` are those of the call; None stands for those of `core`.
    """
    mask_type = core.attn_mask_type if mask_type is None else mask_type
    window = core.window_size if window is None else as_window(window)
    rule = mask_rule(mask_type, window)
    if rule.left >= 0 or rule.right >= 0:
        raise ValueError(
            "[MultiheadAttention] expected the mask type no_mask, padding or arbitrary, and no"
            " window, in cross attention with inference_params, whose steps do not begin at"
            f" the first query, got {mask_type!r} and the window {window}: give a mask of the type"
            " arbitrary for the queries of the step"
        )


def with_cache(
    tensors: Tensors, own: CallArguments, params: InferenceParams, layer_number: int | None
) -> tuple[Tensors, CallArguments, CachedStep | None]:
    """Cache the new keys and values; queries then see those of all tokens up to their own.

    Returns:
        Query, key and value, and the arguments, as attention takes them. For named sequences also
        the step, which brings the result back to the format of the queries.
    """
    query, key, value = tensors
    asked, new = own.mask_type, (layer_number, key, value)
    mask_type = bottom_right(asked)
    own = own._replace(mask_type=mask_type, bottom_right=True)  # queries are the last tokens
    any_window = own.window not in (None, NO_WINDOW)
    if params.kind == "appended":
        key, value = params.append(*new, own.qkv_format)
        return (query, key, value), own, None
    if params.kind == "fixed":
        hides = known_mask_type(mask_type)
        if hides.padding or hides.arbitrary:
            raise ValueError(
                "[attention] expected a causal mask type or no_mask with a sequence_len_offset that"
                f" is a tensor, got {asked!r}"
            )
        if query.shape[:2] != key.shape[:2]:
            raise ValueError(
                "[InferenceParams] expected as many queries as new keys with a sequence_len_offset"
                f" that is a tensor, got {tuple(query.shape)} and {tuple(key.shape)} (layer number"
                f" {layer_number})"
            )
        key, value, step = params.append_there(*new, own.qkv_format)
        own = own._replace(
            mask_type=mask_type_of_fixed_steps(mask_type, step.query_sequences.longest, any_window),
            query_sequences=step.query_sequences,
            key_sequences=step.key_sequences,
        )
        return (query, key, value), own, None
    if own.qkv_format == "thd":
        _check_without_gaps(own, params)
    named = CachedStep(params, *new, own.qkv_format)
    if named.kind == "fixed" and named.query_sequences.longest == 1 and not any_window:
        mask_type = "padding" if known_mask_type(mask_type).padding else mask_type
    own = own._replace(
        qkv_format="bshd",
        mask_type=mask_type,
        query_sequences=named.query_sequences,
        key_sequences=named.key_sequences,
    )
    return named.batch_first(query, mask_type), own, named


def mask_type_of_fixed_steps(mask_type: str, queries: int | None, any_window: bool) -> str:
    """The mask type with which attention runs if the offset is a tensor.

    A single query is the last token, and a causal mask hides nothing from it.
    """
    causal = known_mask_type(mask_type).causal and (any_window or queries != 1)
    return "padding_causal_bottom_right" if causal else "padding"


def _check_without_gaps(own: CallArguments, params: InferenceParams) -> None:
    """Raise ValueError for gaps between new tokens of `thd`, where the host can read the starts."""
    assert params.cache_manager is not None
    ends = [0, *accumulate(params.cache_manager.new)]
    sides = {"q": own.query_sequences, "kv": own.key_sequences}
    for side, sequences in sides.items():
        starts = sequences.cu_seqlens_padded
        if starts is not None and can_read(starts) and starts[: len(ends)].tolist() != ends:
            raise ValueError(
                f"[InferenceParams] expected new tokens without gaps, cu_seqlens_{side}_padded of"
                f" {ends} as pre_step says, got {starts.tolist()}"
            )


class CachedStep:
    """A step of named sequences: caches the new keys and values, and converts formats.

    `qkv_format` is the format of queries, keys, values and the result; attention runs in `bshd`,
    the format of the cache. `pre_step` must have been called. `kind` is `named`, or `fixed` if the
    lengths are read on the device.
    """

    def __init__(
        self,
        params: InferenceParams,
        layer_number: int | None,
        key: torch.Tensor,
        value: torch.Tensor,
        qkv_format: str,
    ) -> None:
        manager = params.cache_manager
        assert manager is not None
        if not manager.new:
            raise ValueError(
                "[InferenceParams] expected pre_step({sequence: new tokens, ...}) before each step"
                " of the model, got no sequences"
            )
        self.kind = "fixed" if manager.is_fixed(key, qkv_format) else "named"
        longest = max(manager.new)  # known on the host
        if self.kind == "fixed":
            longest = key.shape[1 if qkv_format == "bshd" else 0]
            if qkv_format == "thd" and params.max_ctx_len is not None:
                longest = min(longest, params.max_ctx_len)
        step = params.step(_number_of(layer_number), key, value, qkv_format)
        batch = step.keys.shape[0]
        self.keys, self.values = step.keys, step.values
        self.query_sequences = Sequences(step.cu_seqlens_q[: batch + 1], longest=longest)
        self.key_sequences = Sequences(step.cu_seqlens_kv[: batch + 1], longest=step.max_seqlen_kv)
        self.qkv_format = qkv_format
        self._packed: formats.PackedRows | None = None

    def batch_first(
        self, query: torch.Tensor, mask_type: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, keys and values as `bshd`."""
        if not known_mask_type(mask_type).padding:
            raise ValueError(
                "[attention] expected a padding mask type (padding, padding_causal, ...) for"
                f" InferenceParams of named sequences, got {mask_type!r}"
            )
        if self.qkv_format == "thd":
            cu_seqlens = self.query_sequences.cu_seqlens
            assert cu_seqlens is not None
            longest = self.query_sequences.longest
            self._packed = formats.packed_rows(query.shape[0], cu_seqlens, None, longest)
            query = formats.pad_sequences(query, self._packed)
        elif self.qkv_format == "sbhd":
            query = query.transpose(0, 1)
        return query, self.keys.to(query.dtype), self.values.to(query.dtype)

    def restored(self, out: torch.Tensor) -> torch.Tensor:
        """The result in the format of the queries."""
        if self._packed is not None:
            return formats.pack_sequences(out, self._packed)
        return out.transpose(0, 1) if self.qkv_format == "sbhd" else out
