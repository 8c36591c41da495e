"""How an operator returns the tensors that its backward reads, although they may share memory.

An operator may not return two tensors in the same memory. So it returns all saved tensors as one
slab of bytes: that of the recording, or a copy if the call ran stage by stage. If a call has
several recordings, with collectives between them, it returns each storage separately: as a tensor
if the backward reads the storage only as that tensor, else as bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch._torch_private import memory_of
from transformer_engine.pytorch.kernels.memory import aligned


class Reading(NamedTuple):
    """A view of a storage; the offset is in bytes."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """The view, taken of the memory that begins with the first element of `whole`."""
        typed = whole if whole.dtype is self.dtype else whole.view(self.dtype)
        first = typed.storage_offset() + self.offset // typed.itemsize
        return typed.as_strided(self.shape, self.strides, first)


def reading_of(x: torch.Tensor, start: int = 0) -> Reading:
    """The view of its storage that `x` is; offsets are counted from byte `start`."""
    offset = int(x.storage_offset()) * x.itemsize - start
    # A SymInt has no hash, even if it stands for a constant by now.
    shape, strides = ([int(n) for n in sizes] for sizes in (x.shape, x.stride()))
    return Reading(offset, tuple(shape), tuple(strides), x.dtype)


class Source(NamedTuple):
    """Where the backward operator finds a saved tensor.

    Attributes:
        number: index of a tensor in the list of the inputs and the results of the forward operator.
        reading: the view of that tensor; None for the tensor itself.
    """

    number: int
    reading: Reading | None

    def of(self, known: Sequence[Any]) -> torch.Tensor:
        """The saved tensor; `known` is that list."""
        whole: torch.Tensor = known[self.number]
        return whole if self.reading is None else self.reading.within(whole)


class Pick(NamedTuple):
    """A result of the forward operator.

    Attributes:
        number: index of a tensor in the list of tensors that the call made or saved.
        reading: a view of the storage of that tensor; None for the tensor itself.
    """

    number: int
    reading: Reading | None

    def of(self, made: Sequence[Any]) -> torch.Tensor:
        """The result; `made` is that list."""
        x: torch.Tensor = made[self.number]
        return x if self.reading is None else self.reading.within(_bytes_of(x))


class Slab(NamedTuple):
    """A result of the forward operator: the bytes of all storages that the call has saved.

    Attributes:
        parts: for each storage, the index of a tensor in it (see `Pick`), and the byte of the slab
            at which the storage begins.
        size: size of the slab in bytes.
    """

    parts: tuple[tuple[int, int], ...]
    size: int

    def of(self, made: Sequence[Any]) -> torch.Tensor:
        """The result: the slab of a recording, or a copy."""
        first: torch.Tensor = made[self.parts[0][0]]
        if first.dtype is torch.uint8 and first.shape == (self.size,):
            return first
        slab = first.new_empty((self.size,), dtype=torch.uint8)
        for number, start in self.parts:
            own = _bytes_of(made[number])
            slab.narrow(0, start, own.shape[0]).copy_(own)
        return slab


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    """All of the memory that holds `x`."""
    elements = x.untyped_storage().nbytes() // x.itemsize
    return x.as_strided((elements,), (1,), 0).view(torch.uint8)


class Places(NamedTuple):
    """What the forward operator returns, and where the backward operator finds saved tensors.

    Attributes:
        results: for each result of the chain, its index in the list of the inputs and the results
            of the forward operator.
        picks: the results of the forward operator.
        sources: for each saved tensor, where it is found; None for an entry that is None.
    """

    results: Sequence[int]
    picks: Sequence[Pick | Slab]
    sources: Sequence[Source | None]


def places_of(
    inputs: Sequence[Any],
    results: Sequence[Any],
    saved: Sequence[Any],
    readings: Sequence[Any] | None,
) -> Places:
    """The `Places` of a call.

    Args:
        inputs: the inputs of the operator; entries may be None, here and below.
        results: the results of the chain.
        saved: the saved tensors, or whole buffers that contain them.
        readings: for each entry of `saved`, the views that the backward reads; None to return one
            slab.
    """
    known: dict[int, tuple[int, torch.Tensor]] = {}  # memory of inputs and results
    for number, x in enumerate(inputs):
        if x is not None:
            known.setdefault(memory_of(x), (number, x))
    picks, numbers = list[Pick | Slab](), list[int]()
    for i, x in enumerate(results):
        memory = memory_of(x)
        if memory not in known:
            known[memory] = (len(inputs) + len(picks), x)
            picks.append(Pick(i, None))
        number, whole = known[memory]
        assert x.shape == whole.shape and x.stride() == whole.stride(), "results are parts of one"
        numbers.append(number)
    sources: list[Source | None] = [None] * len(saved)
    fresh = []
    for i, x in enumerate(saved):
        if x is None:
            continue
        if memory_of(x) not in known:
            fresh.append(i)
            continue
        number, whole = known[memory_of(x)]
        start = int(whole.storage_offset()) * whole.itemsize
        sources[i] = Source(number, None if _is_same(x, whole) else reading_of(x, start))
    place = _in_a_slab if readings is None else partial(_apart, readings=readings)
    more, found = place(saved, fresh, len(results), len(inputs) + len(picks))
    for i, source in zip(fresh, found, strict=True):
        sources[i] = source
    return Places(numbers, [*picks, *more], sources)


def _in_a_slab(
    saved: Sequence[Any], fresh: Sequence[int], made: int, count: int
) -> tuple[list[Slab], list[Source]]:
    """One result for all new storages, in the order in which a recording places them.

    Args:
        saved: see `places_of`.
        fresh: indices of the saved tensors that share no storage with an input or a result.
        made: the index of `saved[0]` in the list of tensors that the call made or saved.
        count: the index of the new result in the list of the inputs and results of the operator.
    """
    starts: dict[int, int] = {}
    parts, size = list[tuple[int, int]](), 0
    for i in fresh:
        memory = memory_of(saved[i])
        if memory not in starts:
            starts[memory] = size
            parts.append((made + i, size))
            size += aligned(saved[i].untyped_storage().nbytes())
    whole, sources = Reading(0, (size,), (1,), torch.uint8), []
    for i in fresh:
        own = reading_of(saved[i], -starts[memory_of(saved[i])])
        sources.append(Source(count, None if own == whole else own))
    return [Slab(tuple(parts), size)] if parts else [], sources


def _apart(
    saved: Sequence[Any], fresh: Sequence[int], made: int, count: int, readings: Sequence[Any]
) -> tuple[list[Pick], list[Source]]:
    """A result for each new storage; for the arguments see `_in_a_slab` and `places_of`."""
    ways: dict[int, dict[Reading, None]] = {}
    for i in fresh:
        ways.setdefault(memory_of(saved[i]), {}).update(dict.fromkeys(readings[i]))
    known: dict[int, tuple[int, Reading | None]] = {}
    picks, sources = list[Pick](), list[Source]()
    for i in fresh:
        x, memory = saved[i], memory_of(saved[i])
        if memory not in known:
            only = _only_reading(x, ways[memory])
            known[memory] = (count + len(picks), only)
            picks.append(_pick(made + i, x, only))
        number, only = known[memory]
        own = reading_of(x)
        sources.append(Source(number, None if own == only else own))
    return picks, sources


def _only_reading(x: torch.Tensor, ways: Iterable[Reading]) -> Reading | None:
    """The view through which the whole storage of `x` is read; None if any other view is read."""
    first, *others = ways
    size = first.dtype.itemsize
    for n in first.shape:
        size *= n
    fills = first.offset == 0 and size == x.untyped_storage().nbytes()
    return first if fills and not others else None


def _is_same(x: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether two tensors with one storage are the same view of it; sizes may be symbols."""
    if x is whole:
        return True
    alike = x.dtype is whole.dtype and x.shape == whole.shape and x.stride() == whole.stride()
    return bool(alike and x.storage_offset() == whole.storage_offset())


def _pick(number: int, x: torch.Tensor, only: Reading | None) -> Pick:
    """The result that returns the storage of `x`."""
    if only is None:
        size = x.untyped_storage().nbytes()
        return Pick(number, Reading(0, (size,), (1,), torch.uint8))
    return Pick(number, None if reading_of(x) == only else only)
