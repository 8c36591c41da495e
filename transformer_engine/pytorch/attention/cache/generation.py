"""A step with a cache: what attention is given instead of the keys and values of new tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from transformer_engine.pytorch.attention.core import formats
from transformer_engine.pytorch.attention.core.call import Sequences
from transformer_engine.pytorch.attention.inference import InferenceParams
from transformer_engine.pytorch.attention.masks.masks import NO_WINDOW, Window, bottom_right
from transformer_engine.pytorch.attention.masks.masks import mask_type as known_mask_type


def check_params(params: object, layer_number: int | None, layer: str) -> None:
    """TypeError for anything but this package's class, ValueError for another layer's cache."""
    if not isinstance(params, InferenceParams):
        raise TypeError(
            "[DotProductAttention] expected inference_params of InferenceParams, got"
            f" {type(params).__name__}"
        )
    params.claim(layer_number, layer)


class Inputs(NamedTuple):
    """Queries, keys and values in a format, and which of them a query sees."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    qkv_format: str
    mask_type: str
    of_query: Sequences
    of_key: Sequences
    step: CachedStep | None = None  # of named sequences


def with_cache(
    new: Inputs, params: InferenceParams, layer_number: int | None, window: Window | None
) -> Inputs:
    """Keep the new keys and values; queries then see those of all tokens up to their own.

    Args:
        new: of the new tokens alone.
        params: see `InferenceParams`.
        layer_number: whose cache.
        window: of the call.
    """
    mask_type, kept = bottom_right(new.mask_type), (layer_number, new.key, new.value)
    if params.kind == "appended":
        key, value = params.append(*kept, new.qkv_format)
        return new._replace(key=key, value=value, mask_type=mask_type)
    if params.kind == "fixed":
        hides = known_mask_type(mask_type)
        if hides.padding or hides.arbitrary:
            raise ValueError(
                "[attention] expected a causal mask type or no_mask with a sequence_len_offset that"
                f" is a tensor, got {new.mask_type!r}"
            )
        key, value, step = params.append_there(*kept, new.qkv_format)
        one_query = step.of_query.longest == 1 and window in (None, NO_WINDOW)
        causal = hides.causal and not one_query  # one query is the last: it sees all there is
        mask_type = "padding_causal_bottom_right" if causal else "padding"
        sides = (step.of_query, step.of_key)
        return Inputs(new.query, key, value, new.qkv_format, mask_type, *sides)
    named = CachedStep(params, *kept, new.qkv_format)
    inputs = named.batch_first(new.query, mask_type)
    return Inputs(*inputs, "bshd", mask_type, named.of_query, named.of_key, named)


class CachedStep:
    """Keeps the new keys and values, and brings queries and the result to the cache's format.

    Args:
        params: after `pre_step`.
        layer_number: whose cache.
        key: of the new tokens, in `qkv_format`.
        value: likewise.
        qkv_format: of queries, keys, values and the result.
    """

    def __init__(
        self,
        params: InferenceParams,
        layer_number: int | None,
        key: torch.Tensor,
        value: torch.Tensor,
        qkv_format: str,
    ) -> None:
        assert params.cache_manager is not None
        if not params.cache_manager.new:
            raise ValueError(
                "[InferenceParams] expected pre_step({sequence: new tokens, ...}) before each step"
                " of the model, got no sequences"
            )
        longest = max(params.cache_manager.new, default=0)  # known here: nobody waits for a device
        step = params.step(layer_number or 1, key, value, qkv_format)
        batch = step.keys.shape[0]
        self.keys, self.values = step.keys, step.values
        self.of_query = Sequences(step.cu_seqlens_q[: batch + 1], longest=longest)
        self.of_key = Sequences(step.cu_seqlens_kv[: batch + 1], longest=step.max_seqlen_kv)
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
            cu_seqlens = self.of_query.cu_seqlens
            assert cu_seqlens is not None
            longest = self.of_query.longest
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
