"""`Layout`: the order of rows that all ranks of a reduction group share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from transformer_engine.debug.statistics.buffer import Slot, on_host, to_device
from transformer_engine.debug.statistics.rows import WIDTH, empty_row
from transformer_engine.debug.statistics.subscription import Source
from transformer_engine.debug.statistics.tensor import TensorStatistics


def digest(text: str) -> int:
    """Return a 48-bit hash of a text, which float64 represents exactly."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


class Layout:
    """The slots of some tensors, ordered by name, not by first use, which may differ on each rank.

    Attributes:
        names: the name of each slot: type of device, layer, tensor, source.
        kinds: int64 `[slots]`, values of `Kind`.
        place: for each slot, the index of its row in this order.
        digest: hash of the names.
    """

    def __init__(
        self, tensors: Iterable[TensorStatistics], ranks: Sequence[int] = (), rank: int = 0
    ) -> None:
        found = sorted(
            (
                (row_of(t, source), t.buffer.device, slot, t.counts_on(ranks, rank))
                for t in tensors
                for source, slot in t.slots.items()
            ),
            key=lambda entry: entry[0],
        )
        self.names = tuple(row for row, _, _, _ in found)
        slots = [slot for _, _, slot, _ in found]
        self.kinds = on_host([slot.kind for slot in slots], torch.int64)
        self.place: Mapping[Slot, int] = {slot: at for at, slot in enumerate(slots)}
        self.digest = digest("\n".join(map(str, self.names)))
        self._positions: dict[torch.device, torch.Tensor] = {}
        for device in dict.fromkeys(device for _, device, _, _ in found):
            own = [slot.position for _, other, slot, _ in found if other == device]
            self._positions[device] = to_device(on_host(own, torch.int64), device)
        # If several ranks have the same tensor, one sends its row, and the others send empty rows.
        self._left_out = [at for at, (_, _, _, counts) in enumerate(found) if not counts]
        empty = [empty_row(slots[at].kind) for at in self._left_out]
        self._empty = on_host(empty, torch.float64).view(-1, WIDTH)

    def __len__(self) -> int:
        return len(self.names)

    def rows(self, taken: Mapping[torch.device, torch.Tensor], on: torch.device) -> torch.Tensor:
        """Return the rows of all slots in order, `[slots, 16]`, on the device `on`."""
        parts = [
            taken[device][index].to(on, non_blocking=on.type == "cuda")
            for device, index in self._positions.items()
        ]
        if not parts:
            return torch.empty(0, WIDTH, dtype=torch.float64, device=on)
        rows = torch.cat(parts)
        if self._left_out:
            at = to_device(on_host(self._left_out, torch.int64), on)
            rows.index_copy_(0, at, to_device(self._empty, on))
        return rows


def row_of(tensor: TensorStatistics, source: Source) -> tuple[str, str, str, str]:
    """Return the name of a slot, which is the same on all ranks."""
    return tensor.buffer.device.type, tensor.layer, tensor.tensor, str(source)
