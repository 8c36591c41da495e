"""Rows of the ranks of a reduction group, brought together in one collective a step.

Every rank of a group joins whenever the text of the configuration says that something may be due.
The first time, ranks compare what they look at: a difference is an error on all of them. After
that the size of the collective is fixed, and a header in row 0 says what its sender looked at; it
is read before the next collective, so that ranks that part company stop instead of waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.debug.statistics.buffer import to_device
from transformer_engine.debug.statistics.layout import Layout
from transformer_engine.debug.statistics.rows import WIDTH, merge_ranks
from transformer_engine.debug.statistics.tensor import TensorStatistics

_LEAST_CAPACITY = 64
_ADVICE = (
    "ranks that run different layers (pipeline stages) or have different configurations need "
    "reduction groups of their own: debug_api.set_tensor_reduction_group(group)"
)


def group_size(group: Any) -> int:
    """The number of ranks that reduce together."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank(group) < 0:
        return 1
    return dist.get_world_size(group)


class GroupRows:
    """The collectives of one group.

    Args:
        group: process group; None is all ranks.
        config: digest of the configuration, equal on all ranks.
    """

    def __init__(self, group: Any, config: int) -> None:
        self.group = group
        self.size = group_size(group)
        self._config = config
        self._capacity = 0  # rows of a payload, its header among them
        self._outgrown = False  # a rank had more rows than that
        self._layout: tuple[int, Layout] | None = None
        self._device = torch.device("cpu")
        if dist.get_backend(group) == "nccl":
            self._device = torch.device("cuda", torch.cuda.current_device())

    def layout(self, tensors: Sequence[TensorStatistics]) -> Layout:
        """Of tensors that are only ever added to."""
        if self._layout is None or self._layout[0] != len(tensors):
            self._layout = (len(tensors), Layout(tensors))
        return self._layout[1]

    def gather(
        self, layout: Layout, taken: Mapping[torch.device, torch.Tensor], iteration: int
    ) -> torch.Tensor:
        """All ranks' payloads, `[ranks, capacity, 16]`; every rank of the group must call.

        Raises:
            RuntimeError: ranks look at different tensors, on every rank.
        """
        if not self._capacity or self._outgrown:
            self._agree(layout, iteration)
        header = torch.zeros(1, WIDTH, dtype=torch.float64)
        header[0, :3] = torch.tensor([layout.digest, iteration, len(layout)], dtype=torch.float64)
        rows = layout.rows(taken, self._device)[: self._capacity - 1]
        payload = torch.zeros(self._capacity, WIDTH, dtype=torch.float64, device=self._device)
        payload[:1] = to_device(header, self._device)
        payload[1 : 1 + len(rows)] = rows
        gathered = payload.new_empty(self.size * self._capacity, WIDTH)
        dist.all_gather_into_tensor(gathered, payload, group=self.group)
        return gathered.view(self.size, self._capacity, WIDTH)

    def _agree(self, layout: Layout, iteration: int) -> None:
        """Compare digests; the only time that a step waits for the hosts of other ranks."""
        own = [self._config, layout.digest, iteration]
        mine = torch.tensor(own, dtype=torch.int64, device=self._device)
        everyone = mine.new_empty(self.size * len(own))
        dist.all_gather_into_tensor(everyone, mine, group=self.group)
        found = everyone.view(self.size, -1).tolist()
        if any(other != found[0] for other in found):
            names: list[Any] = [None] * self.size
            dist.all_gather_object(names, layout.names, group=self.group)
            raise RuntimeError(_difference(found, names))
        self._capacity = max(_LEAST_CAPACITY, 1 << (2 * len(layout)).bit_length())
        self._outgrown = False

    def merged(self, gathered: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The rows of all ranks merged, `[slots, 16]`, from a payload that has arrived.

        Slots beyond the capacity come out empty, and the next step makes room for them.

        Raises:
            RuntimeError: ranks look at different tensors.
        """
        headers = gathered[:, 0, :3].tolist()
        if any(header != headers[0] for header in headers):
            seen = ", ".join(
                f"{int(slots)} rows in iteration {int(iteration)} (rank {rank})"
                for rank, (_, iteration, slots) in enumerate(headers)
            )
            raise RuntimeError(
                "[statistics] expected all ranks of the reduction group to look at the same "
                f"tensors, got {seen}; {_ADVICE}"
            )
        room = gathered.shape[1] - 1
        self._outgrown = len(layout) > room
        rows = merge_ranks(gathered[:, 1 : 1 + len(layout)], layout.kinds[:room])
        missing = rows.new_zeros(max(0, len(layout) - room), WIDTH)
        return torch.cat([rows, missing])


def _difference(found: Sequence[Sequence[int]], names: Sequence[Sequence[str]]) -> str:
    """What differs between ranks, in words."""
    text = "[statistics] expected all ranks of the reduction group to look at the same tensors"
    common = set(names[0]).intersection(*names[1:])
    for rank, own in enumerate(names):
        extra = [name for name in own if name not in common]
        if extra:
            more = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
            text += f"; not on all ranks: {', '.join(extra[:3])}{more} (rank {rank})"
    if len({digests[0] for digests in found}) > 1:
        text += "; the ranks' configurations differ"
    if len({digests[2] for digests in found}) > 1:
        text += f"; iterations differ: {[digests[2] for digests in found]}"
    return f"{text}; {_ADVICE}"
