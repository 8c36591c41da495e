"""What an operator returns of the tensors that its backward reads, which may share memory.

An operator may not return two tensors in the same memory. So for each memory it returns one: the
tensor itself where backward reads the memory as that tensor alone, else all its bytes. Both are
equal for calls that ran from a recording, which save whole buffers, and for others, which save
views.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch._torch_private import memory_of


class Reading(NamedTuple):
    """A tensor in some memory; the offset is in bytes."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """The tensor, in memory that `whole` fills."""
        typed = whole if whole.dtype is self.dtype else whole.view(self.dtype)
        first = typed.storage_offset() + self.offset // typed.itemsize
        return typed.as_strided(self.shape, self.strides, first)


def reading_of(x: torch.Tensor, start: int = 0) -> Reading:
    """How `x` reads its memory from byte `start` on."""
    offset = int(x.storage_offset()) * x.itemsize - start
    # What was a symbol, and is a number by now, has no hash.
    shape, strides = ([int(n) for n in sizes] for sizes in (x.shape, x.stride()))
    return Reading(offset, tuple(shape), tuple(strides), x.dtype)


class Source(NamedTuple):
    """Where the backward operator finds a saved tensor.

    Attributes:
        number: among the inputs and the results of the forward operator.
        reading: of it; None for the tensor itself.
    """

    number: int
    reading: Reading | None

    def of(self, known: Sequence[Any]) -> torch.Tensor:
        """The tensor."""
        whole: torch.Tensor = known[self.number]
        return whole if self.reading is None else self.reading.within(whole)


class Pick(NamedTuple):
    """A result of the forward operator.

    Attributes:
        number: of a tensor that the call made or saved.
        reading: of it; None for the tensor itself.
    """

    number: int
    reading: Reading | None

    def of(self, made: Sequence[Any]) -> torch.Tensor:
        """The result."""
        x: torch.Tensor = made[self.number]
        return x if self.reading is None else self.reading.within(_bytes_of(x))


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    """All of the memory that holds `x`."""
    elements = x.untyped_storage().nbytes() // x.itemsize
    return x.as_strided((elements,), (1,), 0).view(torch.uint8)


class Places(NamedTuple):
    """What an operator returns, and where its backward finds what is read.

    Attributes:
        results: of each result of the chain, the number of an input, or of a result of the operator
            behind the inputs.
        picks: the results of the operator.
        sources: of each saved tensor; None for None.
    """

    results: Sequence[int]
    picks: Sequence[Pick]
    sources: Sequence[Source | None]


def places_of(
    inputs: Sequence[Any], results: Sequence[Any], saved: Sequence[Any], readings: Sequence[Any]
) -> Places:
    """The `Places` of a call.

    Args:
        inputs: of the operator; entries may be None, here and below.
        results: of the chain.
        saved: tensors or whole buffers.
        readings: for each of them, in which ways backward reads it.
    """
    known: dict[int, tuple[int, torch.Tensor]] = {}  # memory of inputs and results
    for number, x in enumerate(inputs):
        if x is not None:
            known.setdefault(memory_of(x), (number, x))
    picks, numbers = list[Pick](), list[int]()
    for i, x in enumerate(results):
        memory = memory_of(x)
        if memory not in known:
            known[memory] = (len(inputs) + len(picks), x)
            picks.append(Pick(i, None))
        number, whole = known[memory]
        assert x.shape == whole.shape and x.stride() == whole.stride(), "results are parts of one"
        numbers.append(number)
    ways: dict[int, dict[Reading, None]] = {}
    for x, own in zip(saved, readings, strict=True):
        if x is not None:
            ways.setdefault(memory_of(x), {}).update(dict.fromkeys(own))
    fresh: dict[int, tuple[int, Reading | None]] = {}
    sources: list[Source | None] = []
    for i, x in enumerate(saved):
        if x is None:
            sources.append(None)
            continue
        memory = memory_of(x)
        if memory in known:
            number, whole = known[memory]
            sources.append(Source(number, None if _is_same(x, whole) else _reading_in(x, whole)))
            continue
        if memory not in fresh:
            only = _only_reading(x, ways[memory])
            fresh[memory] = (len(inputs) + len(picks), only)
            picks.append(_pick(len(results) + i, x, only))
        number, only = fresh[memory]
        own = reading_of(x)
        sources.append(Source(number, None if own == only else own))
    return Places(numbers, picks, sources)


def _only_reading(x: torch.Tensor, ways: Iterable[Reading]) -> Reading | None:
    """The way in which all of the memory of `x` is read; None if there are more."""
    first, *others = ways
    size = first.dtype.itemsize
    for n in first.shape:
        size *= n
    fills = first.offset == 0 and size == x.untyped_storage().nbytes()
    return first if fills and not others else None


def _is_same(x: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether two tensors in one memory are equal; sizes may be symbols."""
    if x is whole:
        return True
    alike = x.dtype is whole.dtype and x.shape == whole.shape and x.stride() == whole.stride()
    return alike and x.storage_offset() == whole.storage_offset()


def _reading_in(x: torch.Tensor, whole: torch.Tensor) -> Reading:
    return reading_of(x, int(whole.storage_offset()) * whole.itemsize)


def _pick(number: int, x: torch.Tensor, only: Reading | None) -> Pick:
    """The result that stands for the memory of `x`."""
    if only is None:
        size = x.untyped_storage().nbytes()
        return Pick(number, Reading(0, (size,), (1,), torch.uint8))
    return Pick(number, None if reading_of(x) == only else only)
