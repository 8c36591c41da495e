"""What cache managers share: the lengths of named sequences, and the keys and values of a step.

A manager knows, on the host, the sequences of the current step and their lengths. The cache of a
layer is a table with a row of `[heads, size]` for each token; managers differ in which row a token
has. The batch has slots, numbered from 0, and each sequence has one of them. In a CUDA graph the
lengths are read on the device, see `device_lengths.py`. Programs see the tables in `cache`, divided
into slots or pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.attention.cache.device_lengths import DeviceLengths
from transformer_engine.pytorch.attention.cache.memory import (
    Caches,
    LayerCaches,
    check_pair,
    integers_on,
    outside_of_inference_mode,
    refuse_new_cache,
)
from transformer_engine.pytorch.attention.core.formats import check_format
from transformer_engine.pytorch.capture import is_capturing
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.module.inputs import check_tensors
from transformer_engine.pytorch.module.parameters import default_device


class Step(NamedTuple):
    """What attention needs of a step.

    Attributes:
        keys: `[batch, longest, heads, size]`, keys of all tokens so far.
        values: values, in the same form.
        cu_seqlens_q: int32 `[max_batch + 1]`, ends of the new tokens of each sequence, after a 0;
            absent sequences have no tokens.
        cu_seqlens_kv: the same for all tokens of each sequence.
        max_seqlen_kv: tokens of the longest sequence.
        qkv_format: formats of queries and of keys, such as `bshd_2bshd`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    max_seqlen_kv: int
    qkv_format: str


class KVCacheManager:
    """Base of cache managers, which define `sizes_of_layer`, `row`, `rows_of` and `make_room`.

    Args:
        max_batch_size: the most sequences at a time.
        max_seqlen: the most tokens of a sequence.
        num_heads: key heads.
        head_dim_k: size of a key.
        dtype: dtype of the cache.
        head_dim_v: size of a value; None for that of a key.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_seqlen: int,
        num_heads: int,
        head_dim_k: int,
        dtype: torch.dtype,
        head_dim_v: int | None = None,
    ) -> None:
        self.max_batch_size = max_batch_size
        self.max_seqlen = max_seqlen
        self.num_heads = num_heads
        self.sizes = (head_dim_k, head_dim_k if head_dim_v is None else head_dim_v)
        self.dtype = dtype
        self.pages: list[list[int]] = []  # pages of each slot, if the cache has pages
        self.lengths: dict[Any, int] = {}  # tokens of each sequence after this step, by slot
        self.new: list[int] = []  # new tokens of each slot in this step
        self._of_step: dict[Any, torch.Tensor] = {}  # made once in a step, shared by all layers
        self._lengths: dict[torch.device, DeviceLengths] = {}
        self._with_spare_row: dict[int, Caches] = {}

    @property
    def cache(self) -> LayerCaches:
        """Keys and values of layers `[*sizes_of_layer(), heads, size]`; see `LayerCaches`."""
        return LayerCaches(self._with_spare_row, self.sizes_of_layer)

    @cache.setter
    def cache(self, caches: Mapping[int, Caches]) -> None:
        """Copy `caches` into the memory of the layers; see `LayerCaches`."""
        if not isinstance(caches, LayerCaches) or caches.memory is not self._with_spare_row:
            self.cache.update(caches)

    @property
    def pages_of_sequence(self) -> int:
        """The most pages of a sequence; 0 for a cache without pages."""
        return 0

    def sizes_of_layer(self) -> tuple[int, int]:
        """Dimensions 0 and 1 of a layer's cache: slots or pages, and the rows of each."""
        raise NotImplementedError(
            f"[InferenceParams] expected {type(self).__name__} to have sizes_of_layer(), which"
            " returns (places of the batch, or pages; tokens of each)"
        )

    def row(self, slot: int, token: int) -> int:
        """The row of a token of the sequence in this slot."""
        raise NotImplementedError

    def rows_of(self, slot: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """`row` for many tokens, computed on the device, as a CUDA graph needs it."""
        raise NotImplementedError(
            f"[InferenceParams] expected {type(self).__name__} to have rows_of(slot, token), which"
            " CUDA graphs and padded batches need"
        )

    def make_room(self, kept_slots: list[int], lengths: Mapping[Any, int]) -> None:
        """Prepare the cache for a batch of the old slots `kept_slots`, then new sequences.

        Rows of sequences that have ended are set to zero, because attention may multiply masked
        values by 0, and NaN times 0 is NaN.
        """
        raise NotImplementedError

    def allocate_memory(self, layer_number: int, device: torch.device | None = None) -> None:
        """Allocate a layer's cache, once.

        Raises:
            RuntimeError: a CUDA graph is being captured, whose replays would clear the cache.
        """
        if layer_number in self._with_spare_row:
            return
        refuse_new_cache(layer_number)
        device = default_device(None) if device is None else device
        # One more row than the cache has: captured steps write their padding there.
        sizes = self.sizes_of_layer()
        rows = sizes[0] * sizes[1] + 1
        with outside_of_inference_mode():
            keys, values = (
                torch.zeros(rows, self.num_heads, size, dtype=self.dtype, device=device)
                for size in self.sizes
            )
        self._with_spare_row[layer_number] = (keys, values)
        self.device_lengths(keys.device)

    def reset(self) -> None:
        """Forget all sequences."""
        self.pre_step({})

    def pre_step(self, step_dict: Mapping[Any, int]) -> None:
        """See `InferenceParams.pre_step`; on an error nothing has changed."""
        if is_capturing():
            raise RuntimeError(
                "[InferenceParams] expected pre_step before a replay, got it within the capture of"
                " a CUDA graph, which would keep the lengths of now"
            )
        old = list(self.lengths)
        kept_slots = [slot for slot, name in enumerate(old) if name in step_dict]
        lengths = {old[slot]: self.lengths[old[slot]] + step_dict[old[slot]] for slot in kept_slots}
        lengths |= {name: new for name, new in step_dict.items() if name not in lengths}
        if len(lengths) > self.max_batch_size:
            raise ValueError(
                f"[InferenceParams] expected at most {self.max_batch_size} sequences, got"
                f" {len(lengths)}"
            )
        for name, length in lengths.items():
            if step_dict[name] < 0 or length < 1:
                raise ValueError(
                    "[InferenceParams] expected 1 or more tokens of a new sequence, and 0 or more"
                    f" of one in the cache, got {step_dict[name]} (sequence {name!r})"
                )
            if length > self.max_seqlen:
                raise ValueError(
                    f"[InferenceParams] KV cache overflow: expected at most {self.max_seqlen}"
                    f" tokens of a sequence, got {length} (sequence {name!r})"
                )
        self.make_room(kept_slots, lengths)
        self.lengths = lengths
        self.new = [step_dict[name] for name in lengths]
        self._of_step.clear()
        self._write_lengths()

    def _once(self, what: Any, device: torch.device, make: Callable[[], list[int]]) -> torch.Tensor:
        """The list that `make` returns as an int64 tensor, made once in a step."""
        key = (what, device)
        if key not in self._of_step:
            self._of_step[key] = integers_on(device, make())
        return self._of_step[key]

    def lengths_before(self, device: torch.device | None = None) -> torch.Tensor:
        """int32 `[batch]`, tokens of each sequence before this step."""
        if _in_graph():
            return self.device_lengths(device or self._device()).starts

        def make() -> list[int]:
            return [n - new for n, new in zip(self.lengths.values(), self.new, strict=True)]

        return self._once("before", device or self._device(), make).to(torch.int32)

    def positions(
        self, angles: tuple[torch.Tensor, torch.Tensor], query: torch.Tensor, qkv_format: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Position of each sequence's first new token, and ends of new tokens in a packed step.

        Raises:
            ValueError: fewer rotary angles than positions.
        """
        fixed = self.is_fixed(query, qkv_format)
        longest = self.max_seqlen if fixed else max(self.lengths.values(), default=0)
        which = "max_sequence_length" if fixed else "the tokens of the longest sequence"
        check_angles(angles, longest, which)
        if fixed:
            lengths = self.device_lengths(query.device)
            return lengths.starts, lengths.new_ends
        return self.lengths_before(query.device), self.new_ends(query.device)

    def _device(self) -> torch.device:
        for keys, _ in self._with_spare_row.values():
            return keys.device
        return default_device(None)

    def step(
        self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, qkv_format: str
    ) -> Step:
        """Cache the keys and values of new tokens.

        Args:
            layer_number: number of the layer.
            new_k: keys of the new tokens in `qkv_format`; unless thd, padded to the longest.
            new_v: values, in the same form.
            qkv_format: `sbhd`, `bshd` or `thd`.

        Raises:
            ValueError: keys or values of another shape.
            TypeError: keys or values that are not tensors.
        """
        check_format(qkv_format)
        check_tensors("InferenceParams", new_k=new_k, new_v=new_v)
        check_pair(layer_number, new_k, new_v)
        self.allocate_memory(layer_number, new_k.device)
        if self.is_fixed(new_k, qkv_format):
            return self._fixed_step(layer_number, (new_k, new_v), qkv_format)
        rows = self._rows(new_k.device)
        for cache, new in zip(self._with_spare_row[layer_number], (new_k, new_v), strict=True):
            packed = self._packed(new.detach(), qkv_format)
            _write(cache, rows, packed, f"{tuple(new.shape)} in {qkv_format}")
        longest = max(self.lengths.values(), default=0)
        keys, values = self.gathered(layer_number, longest)
        ends_q = self._ends("new", self.new, new_k.device)
        ends_kv = self._ends("all", list(self.lengths.values()), new_k.device)
        return Step(keys, values, ends_q, ends_kv, longest, f"{qkv_format}_2bshd")

    # ---- Steps of fixed shapes, whose lengths are on the device ----

    def is_fixed(self, x: torch.Tensor, qkv_format: str) -> bool:
        """Whether the lengths of a step with these new tokens are read from `device_lengths`.

        They are in a CUDA graph and its warm-up, and in batches padded with absent sequences.

        Raises:
            ValueError: a number of sequences that is neither that of the step nor the maximum.
        """
        sequences = len(self.new)
        if qkv_format != "thd":
            sequences = x.shape[1 if qkv_format == "sbhd" else 0]
        fixed = _in_graph() or sequences != len(self.new)
        if fixed and qkv_format != "thd" and sequences != self.max_batch_size:
            raise ValueError(
                f"[InferenceParams] expected keys and values of {len(self.new)} sequences, those of"
                f" pre_step, or of max_batch_size={self.max_batch_size} in a batch with padding or"
                f" a CUDA graph, got {sequences}"
            )
        return fixed

    def device_lengths(self, device: torch.device) -> DeviceLengths:
        """The lengths of this step on the device, in tensors that are made once for each."""
        if device not in self._lengths:
            if is_capturing():
                raise RuntimeError(
                    "[InferenceParams] expected a step of the model (a warm-up) before the capture"
                    " of a CUDA graph, got none: lengths have no place that replays find"
                )
            with outside_of_inference_mode():
                sizes = (self.max_batch_size, self.pages_of_sequence)
                self._lengths[device] = DeviceLengths(*sizes, device)
            self._write_lengths()
        return self._lengths[device]

    def _write_lengths(self) -> None:
        for lengths in self._lengths.values():
            lengths.write(list(self.lengths.values()), self.new, self.pages)

    def _fixed_step(
        self, layer_number: int, new: tuple[torch.Tensor, torch.Tensor], qkv_format: str
    ) -> Step:
        """`step` with lengths on the device; padding is written to the spare row."""
        packed = qkv_format == "thd"
        new_k, new_v = (x.transpose(0, 1) if qkv_format == "sbhd" else x for x in new)
        lengths = self.device_lengths(new_k.device)
        slot, place, is_real = lengths.places(new_k.shape[0 if packed else 1], packed)
        caches = self._with_spare_row[layer_number]
        rows = torch.where(is_real, self.rows_of(slot, place), caches[0].shape[0] - 1)
        for cache, x in zip(caches, (new_k, new_v), strict=True):
            flat = x.detach() if packed else x.detach().flatten(0, 1)
            _write(cache, rows.flatten().long(), flat, f"{tuple(x.shape)} in {qkv_format}")
        keys, values = self.whole(layer_number)
        ends = lengths.new_ends, lengths.all_ends
        return Step(keys, values, *ends, self.max_seqlen, f"{qkv_format}_2bshd")

    def whole(self, layer_number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values as `[max_batch_size, max_seqlen, heads, size]`."""
        device = self._with_spare_row[layer_number][0].device
        slot = torch.arange(self.max_batch_size, device=device)[:, None]
        index = self.rows_of(slot, torch.arange(self.max_seqlen, device=device)).flatten()
        return self._selected(layer_number, index, (self.max_batch_size, self.max_seqlen))

    def _selected(
        self, layer_number: int, index: torch.Tensor, sizes: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._with_spare_row[layer_number]
        found = [x.index_select(0, index).view(*sizes, *x.shape[1:]) for x in (keys, values)]
        return found[0], found[1]

    # ---- Steps whose lengths the host knows ----

    def gathered(self, layer_number: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values as `[batch, longest, heads, size]`."""
        batch = len(self.lengths)
        index = self._once(
            longest,
            self._with_spare_row[layer_number][0].device,
            lambda: [self.row(slot, token) for slot in range(batch) for token in range(longest)],
        )
        return self._selected(layer_number, index, (batch, longest))

    def new_ends(self, device: torch.device) -> torch.Tensor:
        """int32 `[batch + 1]`, ends of each sequence's new tokens in a packed step, after a 0."""
        return self._ends("new", self.new, device)[: len(self.new) + 1]

    def _rows(self, device: torch.device) -> torch.Tensor:
        """The rows of this step's new tokens, one sequence after the other."""
        lengths = zip(self.lengths.values(), self.new, strict=True)
        return self._once(
            "rows",
            device,
            lambda: [
                self.row(slot, token)
                for slot, (length, new) in enumerate(lengths)
                for token in range(length - new, length)
            ],
        )

    def _packed(self, x: torch.Tensor, qkv_format: str) -> torch.Tensor:
        """New tokens one sequence after the other, without padding."""
        if qkv_format == "thd":
            return x[: sum(self.new)]
        if qkv_format == "sbhd":
            x = x.transpose(0, 1)
        return torch.cat([x[slot, :new] for slot, new in enumerate(self.new)])

    def _ends(self, what: str, lengths: list[int], device: torch.device) -> torch.Tensor:
        absent = [0] * (self.max_batch_size - len(lengths))
        ends = self._once(what, device, lambda: list(accumulate(lengths + absent, initial=0)))
        return ends.to(torch.int32)


def check_angles(angles: tuple[torch.Tensor, ...], longest: int, which: str) -> None:
    """Raise ValueError if there are fewer rotary angles than positions."""
    if min(one.shape[0] for one in angles) < longest:
        raise ValueError(
            f"[InferenceParams] expected rotary_pos_emb of at least {longest} positions, {which},"
            f" got {[one.shape[0] for one in angles]}"
        )


def _in_graph() -> bool:
    """Whether a CUDA graph is being captured, or a warm-up for one runs."""
    return is_capturing() or autocast_stack().warms_up


def _write(cache: torch.Tensor, rows: torch.Tensor, new: torch.Tensor, what: str) -> None:
    if new.shape[0] != rows.shape[0] or new.shape[1:] != cache.shape[1:]:
        raise ValueError(
            f"[InferenceParams] expected keys and values of {rows.shape[0]} new tokens of"
            f" {tuple(cache.shape[1:])}, got {what}"
        )
    cache.index_copy_(0, rows, new.to(cache.dtype))
