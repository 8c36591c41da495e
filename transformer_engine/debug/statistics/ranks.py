"""`GroupRows`: gathers the rows of all ranks of a group in one collective per step.

In every iteration in which something may be due according to the configuration, all ranks of the
group call one all-gather. Before the first all-gather, ranks compare what they inspect
(`differences`). From then on, all ranks know its size. Row 0 of what a rank sends is a header with
the digest of the names of its rows. If ranks begin to differ later, the headers show it, and the
ranks compare again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.debug.statistics.buffer import on_host, to_device
from transformer_engine.debug.statistics.differences import RankFacts, Row, differ, explain
from transformer_engine.debug.statistics.layout import Layout
from transformer_engine.debug.statistics.rows import WIDTH, Kind, empty_row, merge_ranks
from transformer_engine.debug.statistics.tensor import TensorStatistics
from transformer_engine.pytorch.parallel.collectives import gather_into
from transformer_engine.pytorch.parallel.meeting import Meeting

_LEAST_CAPACITY = 64


class RanksDifferError(RuntimeError):
    """The ranks of a group have sent rows of different tensors."""


class GroupRows:
    """The collectives of one group.

    Args:
        group: process group; None is all ranks.
        purpose: names the meetings of the group in error messages.
        since: see `Meeting`.
    """

    def __init__(self, group: Any, purpose: str, since: int) -> None:
        self.group = group
        self.meeting = Meeting(group, purpose, since=since)
        self.size = len(self.meeting.ranks)
        self.agreed = False
        self._capacity = 0  # rows that each rank sends, including the header
        self._layout: tuple[list[tuple[int, ...]], Layout] | None = None
        self._device = torch.device("cpu")
        if dist.get_backend(group) == "nccl":
            self._device = torch.device("cuda", torch.cuda.current_device())

    def layout(self, tensors: Sequence[TensorStatistics]) -> Layout:
        """Return the layout of the group's tensors, made anew when they or their copies change."""
        replicas = [tensor.replicas for tensor in tensors]
        if self._layout is None or self._layout[0] != replicas:
            self._layout = (replicas, Layout(tensors, self.meeting.ranks, dist.get_rank()))
        return self._layout[1]

    def agree(
        self, facts: RankFacts, rows: Mapping[str, Sequence[Row]], layers: Sequence[str]
    ) -> Mapping[int, Sequence[Row]]:
        """Compare with the other ranks; every rank of the group must call.

        Args:
            facts: the facts of this rank, without `rows` and `layers`.
            rows: see `RankFacts`.
            layers: see `RankFacts`.

        Returns:
            If rows differ, the rows of each rank: every rank must add the rows that it lacks.
            Else {}.

        Raises:
            RuntimeError: ranks differ (raised on every rank), or one did not call in time.
        """
        doing = f"step() of iteration {facts.iteration}"
        self.agreed = True
        verdict = self.meeting.hold(facts.posted(), doing, differ)
        if verdict["alike"]:
            return {}
        if not verdict.get("error"):
            more = replace(facts, rows=rows, layers=layers)
            verdict = self.meeting.hold(more.posted(), doing, explain)
        if verdict["error"]:
            raise RuntimeError(verdict["error"])
        return {int(rank): [*map(tuple, rows)] for rank, rows in verdict["rows"].items()}

    def gather(
        self, layout: Layout, taken: Mapping[torch.device, torch.Tensor], iteration: int
    ) -> torch.Tensor:
        """Gather the header and rows of all ranks, `[ranks, capacity, 16]`; every rank must call.

        Raises:
            RuntimeError: a rank did not call in time.
        """
        self._capacity = self._capacity or _capacity_for(len(layout))
        header = on_host(
            [[layout.digest, iteration, len(layout), *[0.0] * (WIDTH - 3)]], torch.float64
        )
        rows = layout.rows(taken, self._device)[: self._capacity - 1]
        payload = torch.zeros(self._capacity, WIDTH, dtype=torch.float64, device=self._device)
        payload[:1] = to_device(header, self._device)
        payload[1 : 1 + len(rows)] = rows
        gathered = payload.new_empty(self.size * self._capacity, WIDTH)
        started = time.monotonic()
        try:
            gather_into(gathered, payload, group=self.group)
        except RuntimeError as error:
            waited = time.monotonic() - started
            doing = f"step() of iteration {iteration}"
            raise RuntimeError(self.meeting.failed(doing, waited, error)) from error
        return gathered.view(self.size, self._capacity, WIDTH)

    def merged(self, gathered: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Merge gathered rows of all ranks into `[slots, 16]`.

        If there are more slots than the capacity, the others are empty in this step, and the
        capacity grows for the next one.

        Raises:
            RanksDifferError: ranks have sent different tensors or iterations; raised on all ranks.
        """
        headers = gathered[:, 0, :3].tolist()
        if any(header != headers[0] for header in headers):
            raise RanksDifferError("[statistics] expected rows of one iteration of all ranks")
        return self._merged(gathered[:, 1 : 1 + len(layout)], layout)

    def merged_by_name(
        self, gathered: torch.Tensor, layout: Layout, of_ranks: Mapping[int, Sequence[Row]]
    ) -> torch.Tensor:
        """Merge gathered rows of ranks that sent different rows; `of_ranks` is from `agree`."""
        empty = on_host([empty_row(Kind(kind)) for kind in layout.kinds.tolist()], torch.float64)
        rows = empty.view(-1, WIDTH).repeat(self.size, 1, 1)
        for at, rank in enumerate(self.meeting.ranks):
            place = {name: i for i, name in enumerate(of_ranks[rank][: gathered.shape[1] - 1])}
            for i, name in enumerate(layout.names):
                if name in place:
                    rows[at, i] = gathered[at, 1 + place[name]]
        return self._merged(rows, layout)

    def _merged(self, rows: torch.Tensor, layout: Layout) -> torch.Tensor:
        room = rows.shape[1]
        self._capacity = max(
            self._capacity, _capacity_for(len(layout)) if len(layout) > room else 0
        )
        merged = merge_ranks(rows, layout.kinds[:room])
        missing = merged.new_zeros(max(0, len(layout) - room), WIDTH)
        return torch.cat([merged, missing])


def _capacity_for(rows: int) -> int:
    return max(_LEAST_CAPACITY, 1 << (2 * rows).bit_length())
