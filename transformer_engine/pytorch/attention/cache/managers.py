"""The two cache managers of this package: with a fixed room for each sequence, and with pages.

They differ in the row of the cache that a token has; see `kv_cache.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from transformer_engine.pytorch.attention.cache.kv_cache import KVCacheManager
from transformer_engine.pytorch.attention.cache.memory import integers_on


class NonPagedKVCacheManager(KVCacheManager):
    """Every slot has `max_seqlen` rows; when sequences end, later ones move to lower slots."""

    def sizes_of_layer(self) -> tuple[int, int]:
        """The number of slots, and the tokens of each."""
        return self.max_batch_size, self.max_seqlen

    def row(self, slot: int, token: int) -> int:
        """See the base class; slots follow one another."""
        return slot * self.max_seqlen + token

    def rows_of(self, slot: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        return slot * self.max_seqlen + token

    def make_room(self, kept_slots: list[int], lengths: Mapping[Any, int]) -> None:
        """Move the sequences that go on to the first slots, and clear those behind them."""
        count, before = len(kept_slots), len(self.lengths)
        if count == before:
            return
        for slots in chain(*self.cache.values()):
            if kept_slots != list(range(count)):
                slots[:count] = slots.index_select(0, integers_on(slots.device, kept_slots))
            slots[count:before] = 0

    def gathered(self, layer_number: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See the base class; these are views, because the rows of a sequence are contiguous."""
        batch = len(self.lengths)
        keys, values = self.whole(layer_number)
        return keys[:batch, :longest], values[:batch, :longest]

    def whole(self, layer_number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See the base class; these are views, too."""
        return self.cache[layer_number]


class PagedKVCacheManager(KVCacheManager):
    """Sequences take pages of `page_size` rows as they grow, and give them back when they end.

    Args:
        sizes: see `KVCacheManager`.
        page_size: rows of a page; divides `max_seqlen`.
        total_num_pages: pages of a layer; None for as many as full sequences in all slots need.
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
        self.free = list(range(self.total_num_pages))[::-1]

    @property
    def pages_of_sequence(self) -> int:
        """The pages that a sequence of `max_seqlen` tokens fills."""
        return self.max_seqlen // self.page_size

    def sizes_of_layer(self) -> tuple[int, int]:
        """The number of pages, and the tokens of each."""
        return self.total_num_pages, self.page_size

    def row(self, slot: int, token: int) -> int:
        """See the base class. Tokens past the last page are masked: they get rows of the first."""
        page = token // self.page_size
        pages = self.pages[slot]
        return pages[page if page < len(pages) else 0] * self.page_size + token % self.page_size

    def rows_of(self, slot: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        pages = self.device_lengths(token.device).pages
        page = (token // self.page_size).clamp(max=pages.shape[1] - 1)
        return pages[slot, page] * self.page_size + token % self.page_size

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
        if not ended:
            return
        left = [page for own in ended for page in own]
        for cache in chain(*self.cache.values()):
            cache.index_fill_(0, integers_on(cache.device, left), 0)
