"""`Reductions`: the groups of ranks that merge rows.

It says which groups merge in a step, and lets the ranks of a group compare their rows before the
first merge. Rows are merged over the reduction group of the session; rows of weights that tensor
parallel ranks share, over the tensor parallel group of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from transformer_engine.debug.statistics.differences import RankFacts, Row, key_of
from transformer_engine.debug.statistics.layout import Layout, digest
from transformer_engine.debug.statistics.ranks import GroupRows
from transformer_engine.debug.statistics.tensor import TensorStatistics
from transformer_engine.pytorch.parallel.meeting import failures, group_or_world_size, ranks_of

BUILT_IN = ("LogTensorStats", "LogFp8TensorStats")
PURPOSE = "statistics"  # of meetings of the reduction group
LOCAL = object()  # in place of a group: rows that are not reduced


class Reductions:
    """The reduction group of a session, and the groups of its weights.

    Args:
        manager: the `DebugManager` of the session.
        live: returns the statistics of all tensors of the collector.
        learn: makes the statistics of a tensor whose layer has not run on this rank.
    """

    def __init__(
        self,
        manager: Any,
        live: Callable[[], list[TensorStatistics]],
        learn: Callable[[str, str, torch.device], Any],
    ) -> None:
        self._manager = manager
        self._live = live
        self._learn = learn
        self._began = failures()
        self._groups: dict[Any, GroupRows] = {}
        self._grouped: tuple[Any, dict[Any, list[TensorStatistics]]] | None = None
        self._schedules: list[Any] | None = None

    def meet(self, iteration: int) -> None:
        """Compare rows in the groups that have not compared them yet.

        Raises:
            RuntimeError: ranks differ, or one did not call in time.
        """
        for group in self.shared():
            if not self.rows_of(group).agreed:
                self.agree(group, iteration)

    def shared(self) -> dict[Any, list[TensorStatistics]]:
        """Return the tensors by group, without those that are not reduced."""
        return {key: tensors for key, tensors in self.by_group().items() if key is not LOCAL}

    def due(self, iteration: int) -> dict[Any, list[TensorStatistics]]:
        """Return the groups that reduce in this iteration; all ranks of a group decide the same."""
        group = self._manager._tensor_reduction_group
        return {
            key: tensors
            for key, tensors in self.shared().items()
            if any_due(tensors) or (key is group and self._may_be_due(iteration))
        }

    def by_group(self) -> dict[Any, list[TensorStatistics]]:
        """Return the tensors by the group that merges their rows, or `LOCAL`; cached."""
        group = self._manager._tensor_reduction_group
        live = self._live()
        size = group_or_world_size(group)
        key = (group, size, [id(tensor) for tensor in live])
        if self._grouped is None or self._grouped[0] != key:
            homes: dict[Any, Any] = {LOCAL: LOCAL, None: group if size > 1 else LOCAL}
            found: dict[Any, list[TensorStatistics]] = {}
            if homes[None] is group:
                found[group] = []
            for tensor in live:
                if tensor.group not in homes:
                    homes[tensor.group] = _home(tensor.group, homes[None])
                found.setdefault(homes[tensor.group], []).append(tensor)
            self._grouped = key, found
        return self._grouped[1]

    def rows_of(self, group: Any) -> GroupRows:
        """Return the collectives of a group."""
        if group not in self._groups:
            is_main = group is self._manager._tensor_reduction_group
            purpose = PURPOSE if is_main else f"{PURPOSE} of weights"
            self._groups[group] = GroupRows(group, purpose, self._began)
        return self._groups[group]

    def agree(
        self, group: Any, iteration: int, sent: Layout | None = None
    ) -> Mapping[int, Sequence[Row]]:
        """Compare the rows of the ranks of a group, and add rows of layers that have not run here.

        Args:
            group: process group; None is all ranks.
            iteration: the iteration that ends.
            sent: the layout that this rank has sent, if ranks have sent different ones.

        Returns:
            The rows of each rank, if they differ; else {}.
        """
        found = {
            ranks: self.rows_of(key).layout(tensors)
            for key, tensors in self.by_group().items()
            if key is not LOCAL and set(ranks := ranks_of(key)) <= set(ranks_of(group))
        }
        if sent is not None:
            found[ranks_of(group)] = sent
        facts = RankFacts(
            group=ranks_of(group),
            name="" if group is None else getattr(group, "group_name", ""),
            config=digest(str(self._manager.config_hash)),
            sections=tuple(getattr(self._manager, "config_names", ())),
            iteration=iteration,
            digests={key_of(ranks): layout.digest for ranks, layout in found.items()},
        )
        rows = {key_of(ranks): layout.names for ranks, layout in found.items()}
        is_main = group is self._manager._tensor_reduction_group
        layers = sorted(getattr(self._manager, "layer_names", ())) if is_main else ()
        agreed = self.rows_of(group).agree(facts, rows, layers)
        for device, layer, tensor, _ in sorted({row for own in agreed.values() for row in own}):
            here = torch.device(device, torch.cuda.current_device()) if device == "cuda" else device
            self._learn(layer, tensor, torch.device(here))
        return agreed

    def _may_be_due(self, iteration: int) -> bool:
        """Whether the configuration allows that anything is due; the same on all ranks."""
        if self._schedules is None:
            self._schedules = [
                schedule
                for feature in BUILT_IN
                for tensor, schedule in self._manager.schedules(feature)
                if tensor != "weight"
            ]
        return any(schedule.due(iteration) for schedule in self._schedules)

    def check(self) -> None:
        """Raise RuntimeError if other ranks have given up waiting for this one."""
        group = self._manager._tensor_reduction_group
        if group_or_world_size(group) == 1:
            return
        said = self.rows_of(group).meeting.abandoned()
        if said:
            raise RuntimeError(said)


def _home(own: Any, group: Any) -> Any:
    """Return the group that merges a tensor's rows: `own`, or `group` if it has the same ranks."""
    if group_or_world_size(own) == 1:
        return LOCAL
    return group if group is not LOCAL and ranks_of(own) == ranks_of(group) else own


def any_due(tensors: Iterable[TensorStatistics]) -> bool:
    """Whether anything is due in this iteration."""
    return any(tensor.due for tensor in tensors)
