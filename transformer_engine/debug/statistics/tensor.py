"""`TensorStatistics`: the slots of one tensor of a layer, and when statistics are due.

To feed a slot means to merge the moments of a tensor into its row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from transformer_engine.debug.statistics import feeds
from transformer_engine.debug.statistics.buffer import Asks, DeviceBuffer, Slot
from transformer_engine.debug.statistics.rows import Kind
from transformer_engine.debug.statistics.subscription import MOMENTS, Reading, Source, Subscription
from transformer_engine.pytorch.fp8.casts.operands import Fp8Matrix
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.kernels.moments import moments

Rows = tuple[torch.Tensor | None, torch.Tensor | None]
_NO_ROWS: Rows = (None, None)
_OF_BACKWARDS = ("gradient", "dgrad", "wgrad")


class TensorStatistics:
    """Takes the statistics of one tensor of one layer.

    The argument `captured` of methods says that the call is being captured in a CUDA graph. The
    kernels then always get the row, with a flag on the device that says in each replay whether it
    is due.

    Args:
        layer: name of the layer.
        tensor: activation, weight, gradient, output, dgrad or wgrad.
        buffer: the buffer of the tensor's device.
        subscriptions: the requested statistics, in the order of the logs.
        group: the process group that merges the rows of the tensor, or `LOCAL`.
        skipped: called once with layer, tensor and reason if a statistic cannot be taken.
        missed: called with layer and tensor if a backward comes when nothing is due any more.

    Attributes:
        name: names of layer and tensor, and the function that computes the amax over all shards.
        replicas: the ranks that have a copy of the tensor, if several have one.
        in_graph: whether an operator of a compiled graph feeds the tensor.
    """

    def __init__(
        self,
        layer: str,
        tensor: str,
        buffer: DeviceBuffer,
        subscriptions: Sequence[Subscription],
        group: Any,
        skipped: Callable[[str, str, str], None],
        missed: Callable[[str, str], None],
    ) -> None:
        self.layer = layer
        self.tensor = tensor
        self.buffer = buffer
        self.group = group
        self.name = feeds.TensorName(layer, tensor)
        self.replicas: tuple[int, ...] = ()
        self.due = self.in_graph = False
        self.slots: dict[Source, Slot] = {}
        self._schedules: dict[tuple[int, Source], tuple[Any, Asks]] = {}
        for name, source, statistic, schedule in subscriptions:
            if source not in self.slots:
                self.slots[source] = buffer.slot(source.kind)
            key = (id(schedule), source)
            _, asks = self._schedules.get(key, (schedule, ()))
            self._schedules[key] = (schedule, (*asks, (name, statistic)))
        self._moments = self.slots.get(MOMENTS)
        self._casts = [s for s in self.slots if s.kind is Kind.CASTS]
        self._blocks = [s for s in self.slots if s.kind is Kind.BLOCKS]
        self._with_errors = {s.source for s in subscriptions if s.statistic == "mse"}
        self._once = tensor == "weight"  # only the first feed of a step counts
        self._skipped: Callable[[str, str, str], None] | None = skipped
        self._missed = missed
        self.iteration = 0  # that it was last scheduled for
        # Of this iteration, see `enter`; `_ignored`: tensors of the current call do not count.
        self._trained = self._evaluated = self._ignored = False

    def counts_on(self, ranks: Sequence[int], rank: int) -> bool:
        """Whether the rows of this rank count: of ranks with copies, only those of the first do."""
        return rank == min((r for r in self.replicas if r in ranks), default=rank)

    def persistent_tensors(self) -> tuple[torch.Tensor, ...]:
        """The rows and flags, whose addresses recordings and graphs use."""
        return tuple(t for slot in self.slots.values() for t in (slot.row, slot.active))

    def schedule(self, iteration: int) -> None:
        """Decide what is due in the next iteration, and reset the state of the last one."""
        self.clear()
        self.iteration = iteration
        for (_, source), (schedule, asks) in self._schedules.items():
            if schedule is None or schedule.due(iteration):
                self.slots[source].asks += asks
                self.due = True

    def clear(self) -> None:
        """Let nothing be due."""
        self.due = self._trained = self._evaluated = self._ignored = False
        for slot in self.slots.values():
            slot.asks, slot.fed, slot.scales_only = (), False, slot.always_scales

    def free(self) -> None:
        """Give the slots back: nothing feeds this tensor any more."""
        self.clear()
        for slot in self.slots.values():
            self.buffer.free(slot)

    def enter(self, evaluating: bool) -> None:
        """Called when a forward of the layer begins.

        Evaluation counts only in iterations in which the layer is not trained, so that a
        validation between two training steps does not change their statistics.
        """
        if not evaluating and self._evaluated and not self._trained:
            for slot in self.slots.values():
                self.buffer.empty(slot)
                slot.fed = False
        self._ignored = evaluating and self._trained
        self._trained |= not evaluating
        self._evaluated |= evaluating

    def ended(self) -> tuple[Reading, ...]:
        """Return what is read from the rows of the iteration that ends."""
        return tuple(Reading.of(slot) for slot in self.slots.values() if slot.asks)

    def next_change(self, iteration: int) -> int | None:
        """Return the next iteration at which `due` may change; None for never."""
        schedules = [schedule for schedule, _ in self._schedules.values()]
        if not self.due:
            following = [schedule.next(iteration) for schedule in schedules]
            return min((i for i in following if i is not None), default=None)
        ends = [_end_of_run(s, iteration) for s in schedules if s is None or s.due(iteration)]
        return None if None in ends else max(ends)  # type: ignore[type-var]

    def _rows(self, slot: Slot | None, numel: int, captured: bool) -> Rows:
        if slot is None or not self._open(slot, captured):
            return _NO_ROWS
        if self._once:
            slot.numel = numel
        if captured:
            self.buffer.captured = True
            return slot.row, slot.active
        slot.fed = True
        return slot.row, None

    def moments_row(self, numel: int = 0, captured: bool = False) -> Rows:
        """Return the row and flag of moments for a kernel that reads the tensor anyway.

        The caller must pass them to the kernel. They are `(None, None)` if no moments are due.
        `numel`, the number of elements, is needed for weights.
        """
        return self._rows(self._moments, numel, captured)

    def _open(self, slot: Slot | None, captured: bool) -> bool:
        if slot is None:
            return False
        if not (self.due or captured) and self.tensor in _OF_BACKWARDS:
            self._missed(self.layer, self.tensor)
        return captured or not (self._ignored or not slot.due or (self._once and slot.fed))

    def check_forward(self, iteration: int) -> None:
        """Called if nothing is due, with the iteration of the layer's last forward."""
        if iteration == self.iteration or self.tensor not in _OF_BACKWARDS:
            return
        if any(one is None or one.due(iteration) for one, _ in self._schedules.values()):
            self._missed(self.layer, self.tensor)

    def feed_moments(self, x: torch.Tensor, captured: bool = False) -> None:
        """Merge the moments of a tensor, in a kernel that does nothing else."""
        row, active = self._rows(self._moments, x.numel(), captured)
        if row is not None:
            moments(feeds.plain(x), row, active)

    def feed_blocks(self, x: torch.Tensor, captured: bool = False) -> None:
        """Merge the dynamic ranges of a tensor's blocks."""
        for source in self._blocks:
            row, active = self._rows(self.slots[source], x.numel(), captured)
            if row is not None:
                feeds.blocks(x, source, row, active)

    def wants_tensor(self, captured: bool = False) -> bool:
        """Whether `feed_blocks` or `feed_casts` would do anything."""
        sources = (*self._blocks, *self._casts)
        return any(self._open(self.slots[source], captured) for source in sources)

    def feed_casts(
        self,
        x: torch.Tensor | None,
        rowwise: Any,
        columnwise: Any,
        quantizer: Any = None,
        captured: bool = False,
    ) -> None:
        """Merge the statistics of a tensor's casts to FP8.

        Args:
            x: the tensor in high precision, without padding; None for a parameter kept in FP8.
            rowwise: the row-wise operand: `Fp8Matrix`, quantised tensor, plain tensor or None.
            columnwise: the column-wise operand; its codes are transposed.
            quantizer: the quantizer that made the operands.
            captured: see the class.

        Raises:
            ValueError: a cast by the requested recipe cannot be reproduced from the tensor.
        """
        for source in self._casts:
            slot = self.slots[source]
            if not self._open(slot, captured):
                continue
            sides = (columnwise, rowwise) if source.columnwise else (rowwise, columnwise)
            found = feeds.cast(x, sides, source, quantizer, self.name)
            if isinstance(found, str):
                self._skip(found)
                continue
            if isinstance(found, feeds.Scales):
                slot.scales_only = True
                slot.always_scales |= captured
            row, active = self._rows(slot, found.numel, captured)
            if row is not None:
                found.into(row, active, source in self._with_errors)

    def feed(
        self,
        x: torch.Tensor,
        rowwise: Any = None,
        columnwise: Any = None,
        quantizer: Any = None,
        captured: bool = False,
    ) -> None:
        """Take all statistics that are due; the arguments are those of `feed_casts`."""
        self.feed_moments(x, captured)
        self.feed_blocks(x, captured)
        self.feed_casts(x, rowwise, columnwise, quantizer, captured)

    def feed_fp8_weight(
        self,
        weight: Fp8Matrix,
        dtype: torch.dtype,
        quantizer: Any,
        captured: bool = False,
        values: torch.Tensor | None = None,
    ) -> None:
        """Take all due statistics of a weight kept in FP8; `values`: its values, if known."""
        slots = [self._moments, *(self.slots[source] for source in self._blocks)]
        if any(self._open(slot, captured) for slot in slots):
            if values is None:
                values = dequantize(weight.codes, weight.format, weight.scales, dtype)
            self.feed_moments(values, captured)
            self.feed_blocks(values, captured)
        self.feed_casts(None, weight, weight, quantizer, captured)

    def _skip(self, reason: str) -> None:
        if self._skipped is not None:
            self._skipped(self.layer, self.tensor, reason)
            self._skipped = None


def _end_of_run(schedule: Any, iteration: int) -> int | None:
    """Return the first iteration after a due one that may not be due; None if all later are due."""
    if schedule is None:
        return None
    if schedule.freq > 1:
        return iteration + 1
    end: int = next(end for start, end in schedule.intervals if start <= iteration <= end)
    return None if end >= 2**63 - 1 else end + 1
