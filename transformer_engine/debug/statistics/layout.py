"""Which row of a reduction group is which: the same on all of its ranks, or an error."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

from transformer_engine.debug.statistics.buffer import Slot, to_device
from transformer_engine.debug.statistics.rows import WIDTH
from transformer_engine.debug.statistics.tensor import TensorStatistics


def digest(text: str) -> int:
    """48 bits that stand for a text: float64 holds them exactly."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


class Layout:
    """The slots of some tensors, ordered by name rather than by first use.

    Attributes:
        names: of the slots.
        kinds: int64 `[slots]`, values of `Kind`.
        place: slot to its row.
        digest: of the names.
    """

    def __init__(self, tensors: Iterable[TensorStatistics]) -> None:
        found = [
            (str(t.buffer.device.type), f"{t.layer} {t.tensor} {source}", t.buffer.device, slot)
            for t in tensors
            for source, slot in t.slots.items()
        ]
        found.sort(key=lambda entry: entry[:2])
        self.names = tuple(name for _, name, _, _ in found)
        slots = [slot for _, _, _, slot in found]
        self.kinds = torch.tensor([slot.kind for slot in slots], dtype=torch.int64)
        self.place: Mapping[Slot, int] = {slot: at for at, slot in enumerate(slots)}
        self.digest = digest("\n".join(self.names))
        self._positions: dict[torch.device, torch.Tensor] = {}
        for device in dict.fromkeys(device for _, _, device, _ in found):
            own = [slot.position for _, _, other, slot in found if other == device]
            self._positions[device] = to_device(torch.tensor(own, dtype=torch.int64), device)

    def __len__(self) -> int:
        return len(self.names)

    def rows(self, taken: Mapping[torch.device, torch.Tensor], on: torch.device) -> torch.Tensor:
        """The rows of all slots in order, `[slots, 16]`, from each device's buffer."""
        parts = [
            taken[device][index].to(on, non_blocking=on.type == "cuda")
            for device, index in self._positions.items()
        ]
        return torch.cat(parts) if parts else torch.empty(0, WIDTH, dtype=torch.float64, device=on)
