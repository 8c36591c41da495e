"""Tapes: the `_C` calls of a piece of Python, recorded once and repeated by one call.

A chain's Python decides which kernels run, on which memory. For equal facts and equal shapes it
decides the same every time, so it is watched once, with stand-ins in place of tensors and with
kernels that only note their arguments. What it left behind is a program of `_C` (see
csrc/bindings/program.h) and a plan of its memory: every tensor becomes a place (slot, offset). The
slots of a run are, in this order,

    its inputs,
    one slab for what nobody reads afterwards, where tensors that are never needed together overlap,
    one slab for what backward will read,
    its outputs, each a tensor of its own.

Python that does more than allocate and call `_C` (a torch op that computes, say) has no tape.
Stand-ins lie on the CPU and are never touched, so that they cost address space and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_engine import _C
from transformer_engine.pytorch.chain.memory import allocators, strides_of
from transformer_engine.pytorch.fp8.autocast import GemmGroup, autocast_stack

_ALIGNMENT = 512  # what torch's allocator gives, so that kernels choose alike

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.new_empty.default,
}
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_VIEWS = {_aten.view.default, _aten.detach.default}

_STACK = autocast_stack()

Memory = list[torch.Tensor | None]


class Place(NamedTuple):
    """Where a contiguous tensor lies: so many bytes into a slot."""

    slot: int
    offset: int
    shape: torch.Size
    dtype: torch.dtype

    def within(self, slot: torch.Tensor) -> torch.Tensor:
        """The tensor, in the memory of `slot`."""
        start = slot.storage_offset() * slot.itemsize + self.offset
        empty = torch.empty(0, dtype=self.dtype, device=slot.device)
        where = start // self.dtype.itemsize
        empty.set_(slot.untyped_storage(), where, self.shape, strides_of(self.shape))
        return empty


class _Watch(TorchDispatchMode):
    """Keeps what is allocated, and notes whether torch was asked for more than that."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh: list[torch.Tensor] = []
        self.computes = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.fresh.append(result)
        elif func not in _VIEWS:
            self.computes = True
        return result


class Tape(NamedTuple):
    """A recorded piece of Python.

    Attributes:
        run: repeats it. Called with the tuple of inputs, it returns the list of slots; None, with
            nothing done, where the inputs do not look like those of the recording.
        results: slots of what Python returned, None where that was None.
        gemms: that a run counts.
        memory: bytes that a run asks for.
    """

    run: Callable[[tuple[torch.Tensor | None, ...]], Any]
    results: tuple[int | None, ...]
    gemms: GemmGroup
    memory: int


def stand_ins(inputs: Sequence[torch.Tensor | None]) -> Memory:
    """Tensors that look like the inputs, for `record`."""
    return [
        None if t is None else torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in inputs
    ]


def record(
    inputs: Sequence[torch.Tensor | None],
    for_inputs: Memory,
    given: Sequence[torch.Tensor | None],
    python: Callable[[], tuple[Sequence[Any], Sequence[Any]]],
) -> tuple[Tape, list[Place | None]] | None:
    """Watch `python`.

    Args:
        inputs: what runs bring first; at least one is there.
        for_inputs: their stand-ins, which `python` reads.
        given: what runs bring then, and `python` finds by itself.
        python: returns the tensors that are results and those that backward will read (or None).

    Returns:
        The tape, and the places of what backward will read; None where there can be no tape.
    """
    if not all(t is None or _is_plain(t) for t in (*inputs, *given)):
        return None
    recorder, watch = _C.Recorder(), _Watch()
    counts, _STACK.gemm_counts = _STACK.gemm_counts, {}
    recorder.start()
    try:
        with torch.no_grad(), watch:
            results, kept = python()
    finally:
        recorder.stop()
        gemms, _STACK.gemm_counts = _STACK.gemm_counts, counts
    recording = _Recording([*for_inputs, *given], watch.fresh, recorder)
    if watch.computes or not recording.place(results, kept):
        return None
    program = recording.program([*inputs, *given])
    memory = recording.kept_bytes + recording.scratch_bytes + recording.output_bytes
    tape = Tape(program.run, recording.results, tuple(gemms.items()), memory)
    return tape, [recording.place_of(t) for t in kept]


class _Recording:
    """From addresses that were recorded to places."""

    def __init__(self, known: Memory, fresh: list[torch.Tensor], recorder: Any) -> None:
        self.recorder = recorder
        self.inputs = len(known)
        self.fresh = fresh
        self.kept_bytes = self.scratch_bytes = self.output_bytes = 0
        self.outputs: list[tuple[torch.Size, torch.dtype]] = []
        self.results: tuple[int | None, ...] = ()
        # (address, bytes, slot, offset) of every tensor that has a place.
        self.regions = [
            (t.data_ptr(), t.nbytes, slot, 0) for slot, t in enumerate(known) if t is not None
        ]

    def _region(self, address: int) -> tuple[int, int, int, int] | None:
        for region in self.regions:
            if region[0] <= address < region[0] + region[1]:
                return region
        return None

    def place_of(self, t: torch.Tensor | None) -> Place | None:
        """The place of a tensor that has one."""
        region = None if t is None else self._region(t.data_ptr())
        if t is None or region is None:
            return None
        return Place(region[2], region[3] + t.data_ptr() - region[0], t.shape, t.dtype)

    def place(self, results: Sequence[Any], kept: Sequence[Any]) -> bool:
        """Give every tensor a place; False where one cannot have any."""
        tensors = [t for t in (*results, *kept) if t is not None]
        if not all(t.is_contiguous() and t.numel() for t in (*tensors, *self.fresh)):
            return False
        self._place_results(results)
        self._place_kept(kept)
        self._place_scratch()
        if any(self._region(t.data_ptr()) is None for t in tensors):
            return False
        places = [self.place_of(t) for t in results]
        self.results = tuple(None if place is None else place.slot for place in places)
        whole = {(slot, size) for _, size, slot, offset in self.regions if not offset}
        return all(
            place is None or (not place.offset and (place.slot, t.nbytes) in whole)
            for place, t in zip(places, results, strict=True)
        )

    def _place_results(self, results: Sequence[Any]) -> None:
        for t in results:
            if t is not None and self._region(t.data_ptr()) is None:
                self.regions.append((t.data_ptr(), t.nbytes, self._first_output(), 0))
                self.outputs.append((t.shape, t.dtype))
                self.output_bytes += t.nbytes

    def _first_output(self) -> int:
        return self.inputs + 2 + len(self.outputs)

    def _place_kept(self, kept: Sequence[Any]) -> None:
        for t in kept:
            if t is not None and self._region(t.data_ptr()) is None:
                self.regions.append((t.data_ptr(), t.nbytes, self.inputs + 1, self.kept_bytes))
                self.kept_bytes += _aligned(t.nbytes)

    def _place_scratch(self) -> None:
        steps = self.recorder.addresses()
        placed: list[tuple[range, int, int]] = []  # steps, first byte, end
        for t in sorted(self.fresh, key=lambda t: -t.nbytes):
            start, end = t.data_ptr(), t.data_ptr() + t.nbytes
            used = [i for i, step in enumerate(steps) if any(start <= a < end for a in step)]
            if not used or self._region(start) is not None:
                continue
            life = range(used[0], used[-1] + 1)
            offset = 0
            for other, first, last in sorted(placed, key=lambda one: one[1]):
                together = life.start < other.stop and other.start < life.stop
                if together and offset + _aligned(t.nbytes) > first and offset < last:
                    offset = last
            placed.append((life, offset, offset + _aligned(t.nbytes)))
            self.regions.append((start, t.nbytes, self.inputs, offset))
        self.scratch_bytes = max((end for _, _, end in placed), default=0)

    def program(self, inputs: Memory) -> Any:
        """The recorded calls, bound to places."""
        device = next(t.device for t in inputs if t is not None)
        slabs = [((size,), torch.uint8) for size in (self.scratch_bytes, self.kept_bytes)]
        recipes = [
            (tuple(shape), strides_of(shape), dtype) if shape != (0,) else None
            for shape, dtype in [*slabs, *self.outputs]
        ]
        return _C.Program(self.recorder, inputs, self.regions, recipes, allocators(device))


def _is_plain(t: torch.Tensor) -> bool:
    return type(t) in _PLAIN_TYPES and t.is_contiguous() and t.numel() > 0 and not t.is_meta


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
