"""KV cache for generation: keys and values of earlier tokens are kept, not computed again.

It has two forms. The plain form keeps `[max_sequence_length, max_batch_size, heads, size]` for each
layer, and the caller advances `sequence_len_offset` after each step of the whole model:

    params = InferenceParams(max_batch_size, max_sequence_length)
    logits = model(prompt, inference_params=params)
    params.sequence_len_offset += prompt.shape[0]

If the offset is a tensor on the device, no shape depends on it, and a step can be captured into a
CUDA graph (`fixed_steps.py`):

    params.sequence_len_offset = torch.tensor(params.sequence_len_offset, device="cuda")
    with torch.cuda.graph(graph):
        logits = model(token, inference_params=params)
        params.sequence_len_offset += 1

The other form names the sequences of each step, which may differ in length, end and join at any
time. A cache manager (`kv_cache.py`) keeps them; call `pre_step` before each step of the model:

    params = InferenceParams(8, 1024, num_heads_kv=16, head_dim_k=64, dtype=torch.bfloat16)
    params.pre_step(OrderedDict({sequence: new_tokens, ...}))

A CUDA graph reads the lengths of named sequences on the device, where `pre_step` writes them
before each replay; such a step has `max_batch_size` sequences, of which some may be padding:

    layer = te.make_graphed_callables(layer, (x,), sample_kwargs={"inference_params": params})
    params.pre_step({sequence: new_tokens, ...})
    layer(x, inference_params=params)

Queries see the keys up to their own: causal masks and windows are aligned bottom right.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from transformer_engine.pytorch.attention.cache.fixed_steps import FixedStep, FixedSteps, Geometry
from transformer_engine.pytorch.attention.cache.kv_cache import KVCacheManager, Step, check_angles
from transformer_engine.pytorch.attention.cache.managers import (
    NonPagedKVCacheManager,
    PagedKVCacheManager,
)
from transformer_engine.pytorch.attention.cache.memory import (
    as_indices,
    check_cache,
    check_optional,
    check_room,
    in_format,
    plain_caches,
    reorder,
    reorder_lengths,
    write_rows,
)
from transformer_engine.pytorch.attention.cache.owners import Owners
from transformer_engine.pytorch.attention.core.formats import check_format, sequence_dim
from transformer_engine.pytorch.capture import is_capturing
from transformer_engine.pytorch.module.arguments import check_dtypes, check_sizes


class InferenceParams:
    """The state of generation: positions of sequences, and keys and values of earlier tokens.

    Args:
        max_batch_size: the most sequences at a time.
        max_sequence_length: the most tokens of a sequence, prompt included.
        num_heads_kv: key heads of a layer. This and the next two choose the form with `pre_step`.
        head_dim_k: size of a key.
        dtype: of the cache: fp32, fp16 or bf16.
        head_dim_v: size of a value; None for that of a key.
        is_paged: divide the cache into pages, which sequences take as they grow.
        total_num_pages: pages of a layer.
        page_size: tokens of a page; divides `max_sequence_length`.
        max_ctx_len: the most new tokens of a sequence in a step; required for `thd`.
        qkv_format: of queries, keys and values of a step: `sbhd`, `bshd` or `thd`.
        custom_cache_manager: used instead of a manager of this package.

    Attributes:
        sequence_len_offset: tokens in the cache (plain form), which the caller advances. An int, or
            a tensor of int32 or int64, `[]` or `[batch]` (sequences of unequal length), on the
            device of the layers. The host never reads such a tensor: a step takes the whole cache
            and hides what is not written; masks are `causal` or `no_mask`. On a GPU it is not
            checked: tokens beyond `max_sequence_length` overwrite the last ones.
        batch_size_offset: first sequence of the current batch (plain form).
        key_value_memory_dict: `{layer_number: (keys, values)}` (plain form).

    Raises:
        ValueError: sizes that do not fit together.
        TypeError: sizes that are no ints; another dtype.

    Example:
        >>> from transformer_engine.pytorch import MultiheadAttention
        >>> layer = MultiheadAttention(32, 4, device="cpu").eval()
        >>> params = InferenceParams(max_batch_size=2, max_sequence_length=16)
        >>> prompt = layer(torch.randn(5, 2, 32), inference_params=params)
        >>> params.sequence_len_offset += 5
        >>> layer(torch.randn(1, 2, 32), inference_params=params).shape
        torch.Size([1, 2, 32])
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: KVCacheManager | None = None,
    ) -> None:
        sizes = {"max_batch_size": max_batch_size, "max_sequence_length": max_sequence_length}
        check_sizes("InferenceParams", None, **sizes)
        heads = {"num_heads_kv": num_heads_kv, "head_dim_k": head_dim_k, "head_dim_v": head_dim_v}
        pages = {"total_num_pages": total_num_pages, "page_size": page_size}
        check_optional(max_ctx_len=max_ctx_len, **heads, **pages)
        self.max_batch_size = max_batch_size
        self.max_sequence_length = max_sequence_length
        self.sequence_len_offset: Any = 0
        self.batch_size_offset = 0
        self._fixed_steps = FixedSteps()
        self.key_value_memory_dict: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {}
        self._owners = Owners()
        self.qkv_format = check_format(qkv_format)
        self.max_ctx_len = max_ctx_len
        self.is_paged = is_paged
        self.cache_manager = custom_cache_manager
        if custom_cache_manager is not None:
            return
        required = {"num_heads_kv": num_heads_kv, "head_dim_k": head_dim_k, "dtype": dtype}
        missing = [name for name, value in required.items() if value is None]
        if len(missing) == len(required):
            if is_paged:
                raise ValueError(f"[InferenceParams] expected {', '.join(missing)} with is_paged")
            return
        if num_heads_kv is None or head_dim_k is None or dtype is None:
            raise ValueError(
                "[InferenceParams] expected num_heads_kv, head_dim_k and dtype together, got no"
                f" {' and no '.join(missing)}"
            )
        check_dtypes("InferenceParams", None, dtype=dtype)
        if qkv_format == "thd" and max_ctx_len is None:
            raise ValueError("[InferenceParams] expected max_ctx_len with qkv_format 'thd'")
        cache = (max_batch_size, max_sequence_length, num_heads_kv, head_dim_k)
        if is_paged:
            self.cache_manager = PagedKVCacheManager(
                *cache, dtype, head_dim_v, page_size=page_size, total_num_pages=total_num_pages
            )
        else:
            self.cache_manager = NonPagedKVCacheManager(*cache, dtype, head_dim_v)

    @property
    def kind(self) -> str:
        """How keys are kept: `appended`, `fixed` (the offset is a tensor) or `named`."""
        if self.cache_manager is not None:
            return "named"
        return "fixed" if isinstance(self.sequence_len_offset, torch.Tensor) else "appended"

    # ---- The plain form ----

    def append(
        self, layer_number: int | None, key: torch.Tensor, value: torch.Tensor, qkv_format: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache the keys and values of new tokens; return those of all tokens in the same format.

        Args:
            layer_number: number of the layer.
            key: `[sequence, batch, heads, size]`, or batch first in `bshd`.
            value: as `key`.
            qkv_format: `sbhd` or `bshd`.

        Raises:
            ValueError: no room for them, or other sizes than those of the cache.
            RuntimeError: a CUDA graph is being captured.
        """
        _refuse_packed(qkv_format)
        if is_capturing():
            raise RuntimeError(
                "[InferenceParams] expected sequence_len_offset to be a tensor on the device within"
                f" the capture of a CUDA graph, got the int {self.sequence_len_offset}, which"
                f" replays would not see grow (layer number {layer_number})"
            )
        key, value = in_format(key, qkv_format), in_format(value, qkv_format)
        tokens, batch = key.shape[:2]
        self._check_offsets()
        end, last = self.sequence_len_offset + tokens, self.batch_size_offset + batch
        if end > self.max_sequence_length or last > self.max_batch_size:
            raise ValueError(
                f"[InferenceParams] KV cache overflow: expected at most {self.max_sequence_length}"
                f" tokens of {self.max_batch_size} sequences, got {end} of {last} (layer number"
                f" {layer_number})"
            )
        rows = slice(self.batch_size_offset, last)
        caches = self._plain_caches(layer_number, key, value)
        for cache, new in zip(caches, (key, value), strict=True):
            cache[end - tokens : end, rows] = new.detach()
        keys, values = (cache[:end, rows] for cache in caches)
        return in_format(keys, qkv_format), in_format(values, qkv_format)

    def _check_offsets(self) -> None:
        offsets = self.sequence_len_offset, self.batch_size_offset
        if not all([type(offset) is int and offset >= 0 for offset in offsets]):
            named = dict(zip(("sequence_len_offset", "batch_size_offset"), offsets, strict=True))
            check_sizes("InferenceParams", None, 0, **named)

    def append_there(
        self, layer_number: int | None, key: torch.Tensor, value: torch.Tensor, qkv_format: str
    ) -> tuple[torch.Tensor, torch.Tensor, FixedStep]:
        """`append` for an offset on the device: returns the whole cache, and lengths in a step.

        Args:
            layer_number: see `append`.
            key: see `append`.
            value: see `append`.
            qkv_format: see `append`.
        """
        step = self._fixed_step(("keys", layer_number), key, qkv_format)
        caches = self._plain_caches(layer_number, key, value)
        rows = slice(self.batch_size_offset, self.batch_size_offset + step.starts.shape[0])
        check_room(caches, layer_number, (self.max_sequence_length, rows.stop))
        for cache, new in zip(caches, (key, value), strict=True):
            write_rows(cache, step.rows, new.detach().flatten(0, 1), self.max_batch_size)
        keys, values = (cache[:, rows] for cache in caches)
        return in_format(keys, qkv_format), in_format(values, qkv_format), step

    def _fixed_step(self, who: object, x: torch.Tensor, qkv_format: str) -> FixedStep:
        _refuse_packed(qkv_format)
        offset: torch.Tensor = self.sequence_len_offset
        if offset.device != x.device:
            raise ValueError(
                f"[InferenceParams] expected sequence_len_offset on {x.device}, where keys are, got"
                f" {offset.device}"
            )
        sequence_first = qkv_format == "sbhd"
        tokens, batch = x.shape[:2] if sequence_first else x.shape[1::-1]
        sizes = (self.max_sequence_length, self.max_batch_size)
        geometry = Geometry(tokens, batch, sequence_first, self.batch_size_offset, *sizes)
        return self._fixed_steps.step(who, offset, geometry)

    def _plain_caches(
        self, layer_number: int | None, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = (self.max_sequence_length, self.max_batch_size)
        return plain_caches(self.key_value_memory_dict, layer_number, key, value, sizes)

    def swap_key_value_dict(self, batch_indices: Sequence[int] | torch.Tensor) -> None:
        """Reorder the batch of every cache: sequence i becomes what `batch_indices[i]` was.

        A `sequence_len_offset` of `[batch]` is reordered with them, in place.

        Args:
            batch_indices: one old index for each sequence that goes on, at most `max_batch_size`.

        Raises:
            ValueError: nothing is cached yet; more sequences than there is room for; indices out
                of range, which is checked on the CPU only.
            TypeError: indices that are no integers.
        """
        if not self.key_value_memory_dict:
            raise ValueError(
                "[InferenceParams] expected cached keys to swap, got none in key_value_memory_dict;"
                " those of named sequences are in cache_manager.cache"
            )
        index, offset = as_indices(batch_indices), self.sequence_len_offset
        reorder(chain(*self.key_value_memory_dict.values()), index)
        if self.kind == "fixed" and offset.ndim == 1:
            reorder_lengths(offset, index, self.batch_size_offset, self.max_batch_size)

    # ---- Either form ----

    def claim(self, layer_number: int | None, layer: Any) -> None:
        """Register the layer that uses the cache of a number, see `Owners`."""
        if self.cache_manager is not None:
            before = sum(self.cache_manager.lengths.values()) - sum(self.cache_manager.new)
        else:
            before = 1 if self.kind == "fixed" else self.sequence_len_offset
        self._owners.claim(layer_number, layer, before)

    def positions(
        self,
        angles: tuple[torch.Tensor, torch.Tensor],
        query: torch.Tensor,
        qkv_format: str,
        who: object,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None, torch.Tensor | None]:
        """Rotary angles of a step: `(angles, start positions, ends of packed sequences)`.

        Args:
            angles: angles of queries and of keys.
            query: queries in `qkv_format`.
            qkv_format: format of the step.
            who: identifies the caller, who asks once in a step.

        Raises:
            ValueError: fewer angles than positions, or offsets below 0, if the host knows them.
        """
        if self.cache_manager is not None:
            return angles, *self.cache_manager.positions(angles, query, qkv_format)
        if self.kind == "fixed":
            check_angles(angles, self.max_sequence_length, "max_sequence_length")
            step = self._fixed_step(("angles", who), query, qkv_format)
            return angles, step.starts, None
        self._check_offsets()
        start, (query_angles, key_angles) = self.sequence_len_offset, angles
        if qkv_format != "thd":
            end = start + query.shape[sequence_dim(qkv_format)]
            check_angles(angles[:1], end, "sequence_len_offset and the new tokens")
        rest = query_angles[start:]
        return (rest, rest if key_angles is query_angles else key_angles[start:]), None, None

    # ---- The form with named sequences ----

    def pre_step(self, step_dict: Mapping[Any, int]) -> None:
        """Say which sequences the next step of the model has, and how many new tokens of each.

        Sequences that are not named have ended, and free their memory; new names start sequences. A
        sequence with 0 new tokens waits for a later step. The batch of the step consists of the
        sequences in the cache, in the same order as before, and the new ones after them. In calls
        of layers these numbers replace `cu_seqlens` and padding masks, which have no effect.

        Raises:
            ValueError: more sequences or tokens than there is room for.
            TypeError: no mapping, or a number of tokens that is no int.
            RuntimeError: all pages are in use.
        """
        try:
            counts = {name: operator.index(new) for name, new in step_dict.items()}
        except (AttributeError, TypeError) as error:
            raise TypeError(
                "[InferenceParams] expected step_dict to map each sequence to its number of new"
                f" tokens, an int, got {step_dict!r}"
            ) from error
        if self.max_ctx_len is not None and max(counts.values(), default=0) > self.max_ctx_len:
            raise ValueError(
                f"[InferenceParams] expected at most max_ctx_len={self.max_ctx_len} new tokens of a"
                f" sequence, got {step_dict!r}"
            )
        self._manager.pre_step(counts)

    def allocate_memory(self, layer_number: int) -> None:
        """Allocate the cache of a layer now instead of in its first step."""
        self._manager.allocate_memory(layer_number)

    def reset(self) -> None:
        """Forget all tokens; caches, and an offset on the device, keep their memory."""
        self.batch_size_offset = 0
        self._owners = Owners()
        if self.kind == "fixed":
            self.sequence_len_offset.zero_()
            for cache in chain(*self.key_value_memory_dict.values()):
                cache.zero_()  # steps multiply hidden values by 0, and NaN times 0 is NaN
        else:
            self.sequence_len_offset = 0
        if self.cache_manager is not None:
            self.cache_manager.reset()

    def get_seqlens_pre_step(self) -> torch.Tensor:
        """int32 `[batch]`, tokens of each sequence before this step: where its positions start.

        In a CUDA graph `[max_batch_size]`, in memory that `pre_step` writes.
        """
        return self._manager.lengths_before()

    def step(
        self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, qkv_format: str
    ) -> Step:
        """Cache the keys and values of a layer's new tokens, see `kv_cache.Step`."""
        return self._manager.step(layer_number, new_k, new_v, qkv_format)

    def convert_paged_to_nonpaged(self, layer_number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values, `[batch, max_sequence_length, heads, size]`, once cached."""
        check_cache(self._manager.cache, layer_number)
        return self._manager.gathered(layer_number, self.max_sequence_length)

    @property
    def _manager(self) -> KVCacheManager:
        if self.cache_manager is None:
            raise ValueError(
                "[InferenceParams] expected num_heads_kv, head_dim_k and dtype in the constructor"
                " for steps of named sequences, got none of them"
            )
        return self.cache_manager


def _refuse_packed(qkv_format: str) -> None:
    if qkv_format == "thd":
        raise ValueError(
            "[InferenceParams] expected qkv_format sbhd or bshd with"
            " InferenceParams(max_batch_size, max_sequence_length), got thd: give num_heads_kv,"
            " head_dim_k and dtype too"
        )
