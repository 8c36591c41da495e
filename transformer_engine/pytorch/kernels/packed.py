"""Memory of queries, keys and values that are parts of one tensor, and of gradients like them."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

Shapes = tuple[torch.Size, ...]
Strides = tuple[tuple[int, ...], ...]


class Places(NamedTuple):
    """Where the parts lie in `[..., features]`; `by_head`: those of each head are together."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offsets: tuple[int, ...]
    by_head: bool


def empty_like_parts(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Uninitialised tensors of the same shapes; of parts that fill one tensor, such parts.

    Args:
        parts: `[..., heads, size]` each, of one dtype.
    """
    places = places_of(*parts)
    if places is None:
        return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in parts)
    whole = parts[0].new_empty(places.shape)
    return tuple(
        whole.as_strided(x.shape, x.stride(), offset)
        for x, offset in zip(parts, places.offsets, strict=True)
    )


def whole_of(parts: tuple[torch.Tensor, ...], by_head: bool) -> torch.Tensor | None:
    """The tensor `[..., features]` that such parts fill in this way, in their memory."""
    places, storages = places_of(*parts), {x.untyped_storage().data_ptr() for x in parts}
    if places is None or places.by_head is not by_head or len(storages) > 1:
        return None
    return parts[0].as_strided(places.shape, places.strides)


def places_of(*parts: torch.Tensor) -> Places | None:
    """Of parts `[..., heads, size]` that fill one tensor; None of others."""
    first, size = parts[0].data_ptr(), parts[0].element_size()
    return _places(
        tuple(x.shape for x in parts),
        tuple(x.stride() for x in parts),
        tuple((x.data_ptr() - first) // size for x in parts),
    )


@lru_cache(maxsize=1024)
def _places(shapes: Shapes, strides: Strides, distances: tuple[int, ...]) -> Places | None:
    """`distances`: elements from the start of the first part. None where they fill no tensor."""
    lead = shapes[0][:-2]
    sizes = [shape[-1] for shape in shapes]
    features = [shape[-2:].numel() for shape in shapes]
    whole = (*lead, sum(features))
    outer = torch.empty(whole, device="meta").stride()
    ways = [(features, sizes)]  # each part's heads together
    if len({shape[-2] for shape in shapes}) == 1:
        ways.append((sizes, [sum(sizes)] * len(sizes)))  # head by head
    for by_head, (lengths, steps) in enumerate(ways):
        offsets = (0, *accumulate(lengths[:-1]))
        expected = tuple((*outer[:-1], step, 1) for step in steps)
        if (strides, distances) == (expected, offsets) and all(s[:-2] == lead for s in shapes):
            return Places(whole, outer, offsets, bool(by_head))
    return None
