"""Cache managers: where keys and values of named sequences are kept.

A manager knows the sequences of the step at hand and their lengths, on the host; a layer's cache is
rows of `[heads, size]`, one per token. Managers differ only in which row a token has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.attention.core.formats import check_format
from transformer_engine.pytorch.module.parameters import default_device


class Step(NamedTuple):
    """What attention needs of a step.

    Attributes:
        keys: `[batch, longest, heads, size]`, all tokens so far.
        values: likewise.
        cu_seqlens_q: int32 `[max_batch + 1]`, ends of the new tokens of each sequence; sequences
            that are not there have none.
        cu_seqlens_kv: likewise of all tokens.
        max_seqlen_kv: tokens of the longest sequence.
        qkv_format: of queries and of keys, as `bshd_2bshd`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    max_seqlen_kv: int
    qkv_format: str


class KVCacheManager:
    """Base of cache managers; `row` and `rows_of_layer` are what they differ in.

    Args:
        max_batch_size: sequences at a time.
        max_seqlen: tokens of a sequence.
        num_heads: key heads.
        head_dim_k: size of a key.
        dtype: of the cache.
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
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.lengths: dict[Any, int] = {}  # of each sequence after this step, in batch order
        self.new: list[int] = []  # tokens of this step, likewise
        self._of_step: dict[Any, torch.Tensor] = {}  # made once a step, shared by all layers

    def rows_of_layer(self) -> int:
        """Rows of a layer's cache."""
        raise NotImplementedError

    def row(self, slot: int, token: int) -> int:
        """The row of a token of the sequence at this place of the batch."""
        raise NotImplementedError

    def make_room(self, kept_slots: list[int], lengths: Mapping[Any, int]) -> None:
        """The batch now consists of the old slots `kept_slots`, then new sequences."""
        raise NotImplementedError

    def allocate_memory(self, layer_number: int, device: torch.device | None = None) -> None:
        """Allocate a layer's cache, once."""
        if layer_number not in self.cache:
            device = default_device(None) if device is None else device
            keys, values = (
                torch.zeros(
                    self.rows_of_layer(), self.num_heads, size, dtype=self.dtype, device=device
                )
                for size in self.sizes
            )
            self.cache[layer_number] = (keys, values)

    def reset(self) -> None:
        """Forget all sequences."""
        self.pre_step({})

    def pre_step(self, step_dict: Mapping[Any, int]) -> None:
        """See `InferenceParams.pre_step`; on an error nothing has changed."""
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
            if step_dict[name] < 1 or length > self.max_seqlen:
                raise ValueError(
                    f"[InferenceParams] KV cache overflow: expected 1 or more new tokens, at most"
                    f" {self.max_seqlen} in all, got {step_dict[name]} and {length} (sequence"
                    f" {name!r})"
                )
        self.make_room(kept_slots, lengths)
        self.lengths = lengths
        self.new = [step_dict[name] for name in lengths]
        self._of_step.clear()

    def _once(self, what: Any, device: torch.device, make: Callable[[], list[int]]) -> torch.Tensor:
        """A list of this step as an int64 tensor."""
        key = (what, device)
        if key not in self._of_step:
            self._of_step[key] = torch.tensor(make(), dtype=torch.int64, device=device)
        return self._of_step[key]

    def lengths_before(self, device: torch.device | None = None) -> torch.Tensor:
        """int32 `[batch]`, tokens of each sequence before this step."""

        def make() -> list[int]:
            return [n - new for n, new in zip(self.lengths.values(), self.new, strict=True)]

        return self._once("before", device or self._device(), make).to(torch.int32)

    def _device(self) -> torch.device:
        for keys, _ in self.cache.values():
            return keys.device
        return default_device(None)

    def step(
        self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, qkv_format: str
    ) -> Step:
        """Keep the keys and values of new tokens.

        Args:
            layer_number: whose cache.
            new_k: of each sequence's new tokens, in `qkv_format`; padded to the longest unless thd.
            new_v: likewise.
            qkv_format: `sbhd`, `bshd` or `thd`.
        """
        check_format(qkv_format)
        self.allocate_memory(layer_number, new_k.device)
        rows = self._rows(new_k.device)
        for cache, new in zip(self.cache[layer_number], (new_k, new_v), strict=True):
            packed = self._packed(new.detach(), qkv_format)
            if packed.shape[0] != rows.shape[0] or packed.shape[1:] != cache.shape[1:]:
                raise ValueError(
                    f"[InferenceParams] expected keys and values of {rows.shape[0]} new tokens of"
                    f" {tuple(cache.shape[1:])}, got {tuple(new.shape)} in {qkv_format}"
                )
            cache.index_copy_(0, rows, packed.to(cache.dtype))
        longest = max(self.lengths.values(), default=0)
        keys, values = self.gathered(layer_number, longest)
        ends_q = self._ends("new", self.new, new_k.device)
        ends_kv = self._ends("all", list(self.lengths.values()), new_k.device)
        return Step(keys, values, ends_q, ends_kv, longest, f"{qkv_format}_2bshd")

    def gathered(self, layer_number: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values as `[batch, longest, heads, size]`."""
        batch = len(self.lengths)
        keys, values = self.cache[layer_number]
        index = self._once(
            longest,
            keys.device,
            lambda: [self.row(slot, token) for slot in range(batch) for token in range(longest)],
        )
        return (
            keys.index_select(0, index).view(batch, longest, *keys.shape[1:]),
            values.index_select(0, index).view(batch, longest, *values.shape[1:]),
        )

    def new_ends(self, device: torch.device) -> torch.Tensor:
        """int32 `[batch + 1]`, ends of the new tokens of each sequence, packed."""
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


class NonPagedKVCacheManager(KVCacheManager):
    """Every place of the batch has `max_seqlen` rows; when sequences end, later ones move up."""

    def rows_of_layer(self) -> int:
        """All tokens of all places."""
        return self.max_batch_size * self.max_seqlen

    def row(self, slot: int, token: int) -> int:
        """Places follow one another."""
        return slot * self.max_seqlen + token

    def make_room(self, kept_slots: list[int], lengths: Mapping[Any, int]) -> None:
        """Move the sequences that go on together."""
        if kept_slots == list(range(len(kept_slots))):
            return
        for caches in self.cache.values():
            for cache in caches:
                slots = cache.view(self.max_batch_size, self.max_seqlen, *cache.shape[1:])
                slots[: len(kept_slots)] = slots[kept_slots]

    def gathered(self, layer_number: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views: the rows of a sequence lie together."""
        keys, values = (
            cache.view(self.max_batch_size, self.max_seqlen, *cache.shape[1:])
            for cache in self.cache[layer_number]
        )
        batch = len(self.lengths)
        return keys[:batch, :longest], values[:batch, :longest]


class PagedKVCacheManager(KVCacheManager):
    """Sequences take pages of `page_size` rows as they grow, and give them back when they end.

    Args:
        sizes: see `KVCacheManager`.
        page_size: rows of a page; divides `max_seqlen`.
        total_num_pages: pages of a layer; None for enough for every sequence.
    """

    def __init__(
        self, *sizes: Any, page_size: int | None = None, total_num_pages: int | None = None
    ) -> None:
        super().__init__(*sizes)
        if page_size is None or page_size < 1 or self.max_seqlen % page_size:
            raise ValueError(
                "[InferenceParams] expected max_sequence_length divisible by page_size, got"
                f" {self.max_seqlen} and {page_size}"
            )
        self.page_size = page_size
        enough = self.max_batch_size * self.max_seqlen // page_size
        self.total_num_pages = enough if total_num_pages is None else total_num_pages
        self.pages: list[list[int]] = []  # of each place of the batch
        self.free = list(range(self.total_num_pages))[::-1]

    def rows_of_layer(self) -> int:
        """All pages."""
        return self.total_num_pages * self.page_size

    def row(self, slot: int, token: int) -> int:
        """Tokens past a sequence's last page have the first row: they are masked."""
        page = token // self.page_size
        pages = self.pages[slot]
        return pages[page] * self.page_size + token % self.page_size if page < len(pages) else 0

    def make_room(self, kept_slots: list[int], lengths: Mapping[Any, int]) -> None:
        """Take back the pages of ended sequences, then hand out what the others need."""
        pages = [self.pages[slot] for slot in kept_slots]
        pages += [[] for _ in range(len(lengths) - len(kept_slots))]
        ended = [self.pages[slot] for slot in range(len(self.pages)) if slot not in set(kept_slots)]
        free = self.free + [page for own in ended for page in own]
        wanted = [-(-n // self.page_size) for n in lengths.values()]
        missing = sum(n - len(own) for n, own in zip(wanted, pages, strict=True))
        if missing > len(free):
            raise RuntimeError(
                f"[InferenceParams] KV cache is full! expected at most {len(free)} more pages of"
                f" {self.page_size} tokens, got {missing}"
            )
        self.pages = [
            own + [free.pop() for _ in range(n - len(own))]
            for n, own in zip(wanted, pages, strict=True)
        ]
        self.free = free
