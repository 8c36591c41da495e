"""Memory of queries, keys and values that are parts of one tensor, and of gradients like them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch._torch_private import FakeTensor, is_number, memory_of, part_of
from transformer_engine.pytorch.kernels.memory import new_empty

Sizes = tuple[int, ...]


class PackedLayout(NamedTuple):
    """The memory layout of parts of one tensor `[..., features]`.

    Attributes:
        shape: shape of the whole tensor.
        parts: shape, strides and first element of each part. Not as torch.Size: it costs 0.7 us.
        strides: strides of each part, and its distance in bytes from the start of the first part.
        by_head: the parts of each head are together.
    """

    shape: Sizes
    parts: tuple[tuple[Sizes, Sizes, int], ...]
    strides: list[tuple[Sizes, int]]
    by_head: bool


def empty_like_parts(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Uninitialised tensors like these `[..., heads, size]`, packed into one if these are."""
    layout = packed_layout_of(*parts)
    if layout is None:
        return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in parts)
    whole = new_empty(parts[0], layout.shape)
    return tuple([whole.as_strided(*part) for part in layout.parts])


def map_parts(
    function: Callable[[torch.Tensor], torch.Tensor], parts: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Apply an element-wise `function` of contiguous tensors to each part `[..., heads, size]`.

    If the parts fill one tensor, `function` is called once for that tensor, and the results are
    parts of what it returns. Else it is called for each part, and the results are contiguous.
    """
    first = parts[0]
    # Code that is traced calls it for each part: a compiler does not fuse operators that make parts
    # of a tensor. From fake tensors an operator learns the layout of the results of its calls.
    known = type(first) is torch.Tensor and not torch.compiler.is_compiling()
    layout = packed_layout_of(*parts) if known or type(first) is FakeTensor else None
    if layout is None:
        return tuple([function(x.contiguous()) for x in parts])
    strides = (*first.stride()[:-2], 1)
    whole = function(first.as_strided(layout.shape, strides, first.storage_offset()))
    return tuple([whole.as_strided(*part) for part in layout.parts])


def empty_packed(
    parts: tuple[torch.Tensor, ...], by_head: bool, with_parts: bool
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """An uninitialised tensor `[..., features]` for parts `[..., heads, size]`, and its parts.

    With `by_head`, the parts of each head are together. Without `with_parts` none are made, and
    sizes may be symbols.
    """
    first = parts[0]
    if not with_parts:
        features = sum([x.shape[-2] * x.shape[-1] for x in parts])
        return new_empty(first, (*first.shape[:-2], features)), ()
    layout = _contiguous_layout(tuple([x.shape for x in parts]), by_head)
    whole = new_empty(first, layout.shape)
    return whole, tuple([part_of(whole, *part) for part in layout.parts])


@lru_cache(maxsize=1024)
def _contiguous_layout(shapes: tuple[torch.Size, ...], by_head: bool) -> PackedLayout:
    """The layout of parts of these shapes in a tensor of their own."""
    lead, features = shapes[0][:-2], sum([shape[-2:].numel() for shape in shapes])
    size = sum([shape[-1] for shape in shapes]) if by_head else shapes[0][-1]
    outer = torch.empty((*lead, features), device="meta").stride()
    layout = _packed_layout(shapes, (*outer[:-1], size, 1), 1)
    assert layout is not None and layout.by_head is by_head
    return layout


def packed_base(parts: tuple[torch.Tensor, ...], by_head: bool) -> torch.Tensor | None:
    """The tensor `[..., features]` that these parts fill in this layout; else None."""
    whole: Any = parts[0]._base
    if whole is None or any([part._base is not whole for part in parts]):
        return None
    layout = packed_layout_of(*parts)
    if layout is None or layout.by_head is not by_head or parts[0].data_ptr() != whole.data_ptr():
        return None
    return whole if whole.shape == layout.shape and whole.is_contiguous() else None


def packed_layout_of(*parts: torch.Tensor) -> PackedLayout | None:
    """The layout of parts `[..., heads, size]` that fill one tensor; None for other tensors."""
    first = parts[0]
    if type(first) is FakeTensor:
        return _packed_layout_of_fakes(parts)
    start = first.data_ptr()
    layout = _packed_layout(tuple([x.shape for x in parts]), first.stride(), first.element_size())
    if layout is None or [(x.stride(), x.data_ptr() - start) for x in parts] != layout.strides:
        return None
    return layout


def _packed_layout_of_fakes(parts: tuple[torch.Tensor, ...]) -> PackedLayout | None:
    """`packed_layout_of` for tensors without addresses; None if sizes are symbols."""
    if len({memory_of(x) for x in parts}) > 1:
        return None
    rank = parts[0].dim()
    numbers = [[*x.shape, *x.stride(), x.storage_offset()] for x in parts]
    if not all([is_number(n) for own in numbers for n in own]):
        return None  # comparing symbols would specialise the graph to these sizes
    found = [[int(n) for n in own] for own in numbers]
    shapes, strides = zip(*[(torch.Size(o[:rank]), tuple(o[rank:-1])) for o in found], strict=True)
    item = parts[0].element_size()
    layout = _packed_layout(shapes, strides[0], item)
    begins = [(own[-1] - found[0][-1]) * item for own in found]
    if layout is None or list(zip(strides, begins, strict=True)) != layout.strides:
        return None
    return layout


@lru_cache(maxsize=1024)
def _packed_layout(
    shapes: tuple[torch.Size, ...], first_strides: Sizes, item: int
) -> PackedLayout | None:
    """The layout of such parts, with these strides of the first one; None where there is none."""
    lead = shapes[0][:-2]
    if any(shape[:-2] != lead for shape in shapes):
        return None
    sizes = [shape[-1] for shape in shapes]
    features = [shape[-2:].numel() for shape in shapes]
    whole = (*lead, sum(features))
    outer = torch.empty(whole, device="meta").stride()
    ways = [(features, sizes)]  # each part's heads together
    if len({shape[-2] for shape in shapes}) == 1:
        ways.append((sizes, [sum(sizes)] * len(sizes)))  # head by head
    for by_head, (lengths, steps) in enumerate(ways):
        if first_strides == (*outer[:-1], steps[0], 1):
            begins = accumulate([0, *lengths[:-1]])
            parts = tuple(
                (tuple(shape), (*outer[:-1], step, 1), begin)
                for shape, step, begin in zip(shapes, steps, begins, strict=True)
            )
            strides = [(own, begin * item) for _, own, begin in parts]
            return PackedLayout(whole, parts, strides, bool(by_head))
    return None
