"""Lengths of named sequences in device memory, where a CUDA graph reads them.

`pre_step` writes them before each replay. A captured step has fixed shapes: `max_batch_size`
sequences, of which some may be absent, as many new tokens as the captured tensors have room for,
and the keys of the whole cache. Only these lengths say which sequences, tokens and keys are real.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from transformer_engine.pytorch.attention.cache.memory import integers_on


class DeviceLengths:
    """The tensors of a step, views of one tensor whose address never changes.

    Args:
        max_batch: the most sequences at a time.
        max_pages: the most pages of a sequence; 0 for a cache without pages.
        device: of the cache.

    Attributes:
        starts: int32 `[max_batch]`, tokens of each sequence before this step; 0 if it is absent.
        new_ends: int32 `[max_batch + 1]`, cumulative numbers of new tokens, like `cu_seqlens`.
        all_ends: int32 `[max_batch + 1]`, cumulative numbers of all tokens.
        pages: int32 `[max_batch, max_pages]`, the pages of each sequence in their order; unused
            entries repeat its first page.
    """

    def __init__(self, max_batch: int, max_pages: int, device: torch.device) -> None:
        self.max_batch, self.max_pages = max_batch, max_pages
        sizes = (max_batch, max_batch + 1, max_batch + 1, max_batch * max_pages)
        self._memory = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.starts, self.new_ends, self.all_ends, pages = self._memory.split(sizes)
        self.pages = pages.view(max_batch, max_pages)

    def write(
        self, lengths: Sequence[int], new: Sequence[int], pages: Sequence[Sequence[int]]
    ) -> None:
        """Write the tokens of each sequence after the next step, its new tokens, and its pages."""
        absent = [0] * (self.max_batch - len(new))
        values = [length - count for length, count in zip(lengths, new, strict=True)] + absent
        values += accumulate([*new, *absent], initial=0)
        values += accumulate([*lengths, *absent], initial=0)
        for own in pages:
            values += [*own, *list(own[:1]) * (self.max_pages - len(own))]
        values += [0] * (self._memory.numel() - len(values))
        self._memory.copy_(integers_on(self._memory.device, values))

    def places(self, tokens: int, packed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For each token of a step: its sequence, its position there, and whether it is real.

        Args:
            tokens: number of tokens of each sequence, or of all sequences if they are packed.
            packed: sequences follow one another without padding.

        Returns:
            Three tensors that broadcast to `[max_batch, tokens]`, or `[tokens]`.
        """
        token = torch.arange(tokens, dtype=torch.int32, device=self.starts.device)
        if not packed:
            slot = torch.arange(self.max_batch, device=token.device)[:, None]
            return slot, self.starts[:, None] + token, token < self.new_ends.diff()[:, None]
        slot = torch.searchsorted(self.new_ends[1:], token, right=True)
        slot = slot.clamp_(max=self.max_batch - 1)
        place = self.starts[slot] + token - self.new_ends[slot]
        return slot, place, token < self.new_ends[-1]
