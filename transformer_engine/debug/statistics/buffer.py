"""The rows of all inspected tensors on one device.

Rows are allocated in chunks whose addresses never change, because captured graphs write into them.
Each row has an int32 flag, which the kernels of a graph read: if it is zero, they skip the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from transformer_engine.debug.statistics.rows import WIDTH, Kind, empty_row

CHUNK = 1024
Asks = tuple[tuple[str, str], ...]


@dataclass(slots=True, eq=False)
class Slot:
    """One row: `row` float64 `[16]`, `active` int32 `[1]`, both views of memory of a chunk.

    Attributes:
        position: index of the row in the buffer.
        kind: layout of the row.
        asks: statistics to read from the row after this iteration: pairs of the name in the logs
            and the statistic. They are decided before the iteration begins.
        fed: whether a kernel got the row in this iteration.
        scales_only: whether only scales were merged into the row in this iteration.
        always_scales: whether a captured graph merges only scales into the row.
        numel: number of elements of a weight; 0 for other tensors, whose rows accumulate.
    """

    position: int
    kind: Kind
    row: torch.Tensor
    active: torch.Tensor
    asks: Asks = ()
    fed: bool = False
    scales_only: bool = False
    always_scales: bool = False
    numel: int = 0

    @property
    def due(self) -> bool:
        """Whether anything is read from the row after this iteration."""
        return bool(self.asks)


def on_host(values: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in host memory, also under `torch.set_default_device`."""
    return torch.tensor(values, dtype=dtype, device="cpu")


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to a device without waiting for the device."""
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


class _Chunk:
    def __init__(self, device: torch.device) -> None:
        neutral = on_host([empty_row(kind) for kind in Kind], torch.float64)
        self.neutral = to_device(neutral, device)
        self.empty = torch.zeros(CHUNK, WIDTH, dtype=torch.float64, device=device)
        self.rows = torch.zeros_like(self.empty)
        self.active = torch.zeros(CHUNK, dtype=torch.int32, device=device)
        self.used = 0


class DeviceBuffer:
    """The slots on one device; see the docstring of this file."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slots: list[Slot] = []
        self.captured = False  # a graph may hold addresses of rows and flags
        self._chunks: list[_Chunk] = []
        self._flags: list[bool] = []
        self._free: list[int] = []  # positions that a new slot may take

    @torch.inference_mode(mode=False)  # kernels also write rows outside of inference mode
    def slot(self, kind: Kind) -> Slot:
        """Return a new slot with an empty row.

        Raises:
            RuntimeError: memory is needed inside a CUDA graph capture.
        """
        is_capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if is_capturing:
            raise RuntimeError(
                "[statistics] a tensor is inspected for the first time inside a CUDA graph "
                "capture; run one step with the same layers before capturing"
            )
        position = self._free.pop() if self._free else self._grow()
        chunk, at = self._chunks[position // CHUNK], position % CHUNK
        for rows in (chunk.empty, chunk.rows):
            rows[at].copy_(chunk.neutral[kind])
        slot = Slot(position, kind, chunk.rows[at], chunk.active[at : at + 1])
        self.slots[position] = slot
        self._flags = []  # `refresh` must copy them, because the new slot has no flag yet
        return slot

    def _grow(self) -> int:
        if not self._chunks or self._chunks[-1].used == CHUNK:
            self._chunks.append(_Chunk(self.device))
        self._chunks[-1].used += 1
        self.slots.append(None)  # type: ignore[arg-type]
        return len(self.slots) - 1

    def empty(self, slot: Slot) -> None:
        """Reset the row of a slot."""
        chunk, at = self._chunks[slot.position // CHUNK], slot.position % CHUNK
        chunk.rows[at].copy_(chunk.empty[at])

    def free(self, slot: Slot) -> None:
        """Let a later slot reuse the row, which `take` has copied already."""
        self._free.append(slot.position)

    def refresh(self) -> None:
        """Copy the flags of due slots to the device, if they have changed: one copy per chunk.

        Flags are kept up to date even before a graph exists, because a capture cannot copy them.
        """
        flags = [slot.due for slot in self.slots]
        if flags == self._flags:
            return
        self._flags = flags
        for number, chunk in enumerate(self._chunks):
            own = on_host(flags[number * CHUNK :][: chunk.used], torch.int32)
            chunk.active[: chunk.used].copy_(to_device(own, self.device))

    def take(self) -> torch.Tensor:
        """Return a copy of all rows, `[slots, 16]`, on the device, and reset the rows."""
        taken = [chunk.rows[: chunk.used].clone() for chunk in self._chunks]
        for chunk in self._chunks:
            chunk.rows[: chunk.used].copy_(chunk.empty[: chunk.used])
        return taken[0] if len(taken) == 1 else torch.cat(taken)

    def close(self) -> None:
        """End the session; captured graphs may still read flags, which are zero from now on."""
        if self.captured:
            self.refresh()
            _KEPT_FOR_GRAPHS.extend(self._chunks)


# Graphs that outlive their session still read flags, so the memory must not be freed.
_KEPT_FOR_GRAPHS: list[_Chunk] = []
