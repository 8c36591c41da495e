"""Recordings: the `_C` calls of a piece of Python, recorded once and repeated by one call.

The Python of a chain decides which kernels run, on which memory. For equal facts and equal shapes
it decides the same every time. So it runs once with stand-ins in place of tensors, while the ops of
`_C` only record their arguments. The result is a recording of `_C` (see csrc/bindings/recording.h)
and a memory plan, in which every tensor is a slice of a buffer. The buffers (slots) of a call are,
in this order,

    its inputs,
    one slab for scratch, where tensors whose lifetimes do not overlap share memory,
    one slab for what backward will read,
    all other tensors: results, and all that is in no slab.

Slabs save host time, because one allocation serves many tensors. If memory matters more than host
time, there are no slabs: each tensor is allocated before the first call that uses it, and freed
after the last one.

Tensors that outlive the call (scales, amaxes) are named beforehand and keep their addresses. If a
call uses an address in any other memory, the recording is refused; it is also refused if Python
does more than allocate, make views and call `_C`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from transformer_engine import _C
from transformer_engine.pytorch._torch_private import TorchDispatchMode, without_modes
from transformer_engine.pytorch.capture import NotRecordedError
from transformer_engine.pytorch.chain.stand_ins import (
    Buffers,
    Shape,
    Tensors,
    extent,
    in_memory_of,
)
from transformer_engine.pytorch.fp8.counter import CountedGroup
from transformer_engine.pytorch.fp8.process_state import process_state
from transformer_engine.pytorch.kernels.memory import aligned, allocators, strides_of
from transformer_engine.pytorch.parallel.peer_memory import drop_recorded
from transformer_engine.pytorch.plain_tensors import PLAIN_TYPES

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.new_empty.default,
}
_VIEWS = {
    _aten._unsafe_view.default,
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.detach.default,
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.transpose.int,
    _aten.unbind.int,
    _aten.unsqueeze.default,
    _aten.view.default,
    _aten.view.dtype,
}


class BufferSlice(NamedTuple):
    """A tensor that lies in a buffer; the offset is in bytes. It may be all of the buffer."""

    slot: int
    offset: int
    shape: Shape
    strides: Shape
    dtype: torch.dtype
    whole: bool

    def within(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor, in the memory of its buffer."""
        if self.whole:
            return buffer
        start = buffer.storage_offset() * buffer.itemsize + self.offset
        return in_memory_of(buffer, start, self.shape, self.strides, self.dtype)

    def view_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The same as a view, as a backward returns it: `packed_base` finds what it is part of."""
        if self.whole or buffer.dtype is not self.dtype:
            return self.within(buffer)
        first = buffer.storage_offset() + self.offset // self.dtype.itemsize
        return buffer.as_strided(self.shape, self.strides, first)


class Recorded(NamedTuple):
    """A recorded piece of Python.

    Attributes:
        run: repeats the calls. It empties the list of inputs and returns the list of buffers; or
            None, without running, if the inputs differ from those of the recording in shape,
            strides, dtype or device.
        results: slices of what Python returned.
        saved: slices of what it saved for the backward.
        gemms: the GEMMs of a call, for `gemm_report`.
        sent: the collectives of a call, for `parallel_report`; None if there are none.
        bytes: how many bytes a call allocates in all.
    """

    run: Callable[[list[torch.Tensor | None]], Any]
    results: Sequence[BufferSlice | None]
    saved: Sequence[BufferSlice | None]
    gemms: CountedGroup
    sent: CountedGroup | None
    bytes: int

    def count_call(self) -> None:
        """Add the GEMMs and collectives of one call to the reports."""
        self.gemms.add()
        if self.sent is not None:
            self.sent.add()


class Slabs(NamedTuple):
    """Which slabs a call has: one buffer for all tensors of a kind.

    Attributes:
        scratch: a slab for the tensors that nobody reads after the call.
        saved: a slab for the tensors that the backward will read.
    """

    scratch: bool = True
    saved: bool = True


BOTH_SLABS, NO_SLABS = Slabs(), Slabs(scratch=False, saved=False)


def slabs_of(large: bool, apart: bool) -> Slabs:
    """The slabs of a segment.

    Args:
        large: memory matters more than host time.
        apart: the segment is one of several recordings of an operator, which must return saved
            tensors separately; see `operator_memory`.
    """
    return Slabs(scratch=not large, saved=not (large or apart))


class _Watch(TorchDispatchMode):
    """Collects the tensors that are allocated, and the name of any other operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[torch.Tensor] = []
        self.computes = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.allocated.append(result)
        elif func not in _VIEWS:
            self.computes = str(func)
        return result


def is_plain(t: torch.Tensor | None, any_strides: bool) -> bool:
    """Whether a recording can take this as an input."""
    return t is None or (
        type(t) in PLAIN_TYPES
        and (any_strides or t.is_contiguous())
        and t.numel() > 0
        and not t.is_meta
        and t.data_ptr() % 16 == 0
    )


@without_modes()
def record(
    inputs: Tensors,
    for_inputs: Buffers,
    direct: Tensors,
    persistent: list[torch.Tensor],
    python: Callable[[], tuple[Tensors, Tensors]],
    slabs: Slabs = BOTH_SLABS,
    most_bytes: float = float("inf"),
    any_strides: bool = False,
) -> Recorded | str:
    """Record the calls of `_C` that `python` makes.

    Args:
        inputs: the first inputs of a call.
        for_inputs: their stand-ins, which `python` reads.
        direct: further inputs of calls, which `python` reads itself, without stand-ins.
        persistent: tensors that outlive the call, and that `python` may read and write. The
            recording holds them.
        python: returns two lists: results, and what backward will read. Entries may be None.
        slabs: which slabs the recording uses.
        most_bytes: a call that would allocate more than this gets no slabs.
        any_strides: `python` reads inputs of any strides, without a copy.

    Returns:
        What was recorded, or the reason why it cannot be recorded.
    """
    if all(t is None for t in (*inputs, *direct)):
        return "no input is a tensor"
    if not all(is_plain(t, any_strides) for t in (*inputs, *direct)):
        return "an input is no contiguous tensor that begins at 16 bytes"
    recorder, watch, state = _C.Recorder(), _Watch(), process_state()
    recorder.start()
    try:
        with torch.no_grad(), state.gemms.apart() as gemms, state.sent.apart() as sent, watch:
            results, saved = python()
    except NotRecordedError as reason:
        drop_recorded()
        return str(reason)
    finally:
        recorder.stop()
    if watch.computes:
        return f"torch computes: {watch.computes}"
    buffers = _BufferPlan([*for_inputs, *direct], watch.allocated, recorder)
    problem = buffers.place(results, saved, slabs)
    if not problem and slabs.saved and buffers.bytes > most_bytes:
        buffers = _BufferPlan(buffers.known, watch.allocated, recorder)
        problem = buffers.place(results, saved, NO_SLABS)
    if problem:
        return problem
    recording = buffers.recording([*inputs, *direct], persistent)
    if problem := recording.place(recorder, buffers.ranges, buffers.uses(results, saved)):
        return problem
    return Recorded(
        recording.run,
        [buffers.slice_of(t) for t in results],
        [buffers.slice_of(t) for t in saved],
        state.gemms.group(gemms),
        state.sent.group(sent) if sent else None,
        buffers.bytes,
    )


class _BufferPlan:
    """Gives every tensor of a recording a place: a slot and an offset."""

    def __init__(self, known: Buffers, allocated: list[torch.Tensor], recorder: Any) -> None:
        self.calls = recorder.addresses()
        self.known = known
        self.inputs = len(known)
        self.allocated = allocated
        self.saved_bytes = self.scratch_bytes = self.output_bytes = 0
        self.outputs: list[torch.Tensor] = []
        # (address, bytes, slot, offset) of every tensor that has a place.
        self.ranges = [
            (t.data_ptr(), extent(t), slot, 0) for slot, t in enumerate(known) if t is not None
        ]

    @property
    def bytes(self) -> int:
        """How many bytes a call allocates in all."""
        return self.saved_bytes + self.scratch_bytes + self.output_bytes

    def _range(self, address: int) -> tuple[int, int, int, int] | None:
        """The range with an address; of those of parts of one tensor, the last that has begun."""
        found = [one for one in self.ranges if one[0] <= address < one[0] + one[1]]
        return max(found, default=None)

    def _allocation(self, address: int) -> torch.Tensor | None:
        for t in self.allocated:
            if t.data_ptr() <= address < t.data_ptr() + t.nbytes:
                return t
        return None

    def slice_of(self, t: torch.Tensor | None) -> BufferSlice | None:
        """The place of a tensor; None if it has none."""
        found = None if t is None else self._range(t.data_ptr())
        if t is None or found is None:
            return None
        slot, offset = found[2], found[3] + t.data_ptr() - found[0]
        whole = None
        if slot < self.inputs:
            whole = self.known[slot]
        elif slot >= self.inputs + 2:
            whole = self.outputs[slot - self.inputs - 2]
        same = whole is not None and (t.shape, t.stride()) == (whole.shape, whole.stride())
        return BufferSlice(slot, offset, tuple(t.shape), t.stride(), t.dtype, same)

    def place(self, results: Tensors, saved: Tensors, slabs: Slabs) -> str:
        """Give every tensor a place. Returns why one cannot have any, or `""`."""
        tensors = [t for t in (*results, *saved) if t is not None]
        if not all(t.numel() for t in (*tensors, *self.allocated)):
            return "a tensor is empty"
        for t in results:
            self._place(t, self._as_output)
        for t in saved:
            self._place(t, self._as_saved if slabs.saved else self._as_output)
        if slabs.scratch:
            self._place_scratch()
        else:
            for t in self.allocated:
                if self._calls_with(t.data_ptr(), t.nbytes):
                    self._place(t, self._as_output)
        if any(self._range(t.data_ptr()) is None for t in tensors):
            return "a result was neither allocated here nor brought"
        return ""

    def _place(
        self, t: torch.Tensor | None, put: Callable[[torch.Tensor], tuple[int, int]]
    ) -> None:
        """Give the allocation that holds a tensor a place, unless it has one."""
        if t is None or self._range(t.data_ptr()) is not None:
            return
        whole = self._allocation(t.data_ptr())
        if whole is not None:
            self.ranges.append((whole.data_ptr(), whole.nbytes, *put(whole)))

    def _as_output(self, t: torch.Tensor) -> tuple[int, int]:
        self.outputs.append(t)
        self.output_bytes += t.nbytes
        return self.inputs + 1 + len(self.outputs), 0

    def _as_saved(self, t: torch.Tensor) -> tuple[int, int]:
        offset = self.saved_bytes
        self.saved_bytes += aligned(t.nbytes)
        return self.inputs + 1, offset

    def _place_scratch(self) -> None:
        placed: list[tuple[range, int, int]] = []  # calls that use it, its first byte, its end
        for t in sorted(self.allocated, key=lambda t: -t.nbytes):
            start = t.data_ptr()
            used = self._calls_with(start, t.nbytes)
            if not used or self._range(start) is not None:
                continue
            life = range(used[0], used[-1] + 1)
            offset = 0
            for other, first, last in sorted(placed, key=lambda one: one[1]):
                together = life.start < other.stop and other.start < life.stop
                if together and offset + aligned(t.nbytes) > first and offset < last:
                    offset = last
            placed.append((life, offset, offset + aligned(t.nbytes)))
            self.ranges.append((start, t.nbytes, self.inputs, offset))
        self.scratch_bytes = max((end for _, _, end in placed), default=0)

    def _calls_with(self, start: int, count: int) -> list[int]:
        """The calls that use some of these bytes."""
        return [i for i, call in enumerate(self.calls) if any(0 <= a - start < count for a in call)]

    def uses(self, results: Tensors, saved: Tensors) -> list[tuple[int, int]]:
        """For each slot the first call that uses it, and the last one if nobody reads it later."""
        found = [(0, -1)] * (self.inputs + 2 + len(self.outputs))
        read = {place.slot for t in (*results, *saved) if (place := self.slice_of(t)) is not None}
        for start, count, slot, _ in self.ranges:
            calls = self._calls_with(start, count)
            if calls and not self.inputs <= slot < self.inputs + 2:
                found[slot] = (calls[0], -1 if slot in read else calls[-1])
        return found

    def recording(self, inputs: Tensors, persistent: list[torch.Tensor]) -> Any:
        """A recording of `_C` with these buffers, without calls yet."""
        device = next(t.device for t in inputs if t is not None)
        slabs = [((size,), torch.uint8) for size in (self.scratch_bytes, self.saved_bytes)]
        allocations = [
            (tuple(shape), strides_of(tuple(shape)), dtype) if shape != (0,) else None
            for shape, dtype in [*slabs, *((t.shape, t.dtype) for t in self.outputs)]
        ]
        return _C.Recording(inputs, allocations, allocators(device), persistent)
