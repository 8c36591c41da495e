"""All statistics of a session: which tensors are looked at, when, and the end of every step."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from transformer_engine.debug.names import NAMESPACE
from transformer_engine.debug.statistics.buffer import DeviceBuffer
from transformer_engine.debug.statistics.layout import digest
from transformer_engine.debug.statistics.pending import Due, PendingCopy
from transformer_engine.debug.statistics.quantizer import StatisticsQuantizer
from transformer_engine.debug.statistics.ranks import GroupRows, group_size
from transformer_engine.debug.statistics.subscription import Subscription
from transformer_engine.debug.statistics.tensor import TensorStatistics

if TYPE_CHECKING:
    from transformer_engine.debug.calls import FeatureCalls
    from transformer_engine.pytorch.fp8.quantizers import Quantizer

_MOST_PENDING = 64  # steps in flight before one is waited for
BUILT_IN = ("LogTensorStats", "LogFp8TensorStats")
LOCAL = object()  # instead of a group: rows that stay on their rank


@dataclass
class CostCounter:
    """What inspecting has cost so far."""

    steps: int = 0
    bytes: int = 0
    collectives: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"Statistics: {self.steps} steps, {self.bytes / 2**20:.2f} MiB copied from devices, "
            f"{self.collectives} collectives, {self.seconds:.3f} s of host time in step()"
        )


class Collector:
    """See the module's docstring, and for weights `debug.set_weight_tensor_tp_group_reduce`."""

    def __init__(self, manager: Any, weights_over_tp_group: bool = True) -> None:
        self.manager = manager
        self.iteration: int = manager.iteration
        self.stepped = False  # ever
        self.cost = CostCounter()
        self.weights_over_tp_group = weights_over_tp_group
        self._tensors: dict[tuple[str, str, torch.device], TensorStatistics | None] = {}
        self._buffers: dict[torch.device, DeviceBuffer] = {}
        self._groups: dict[Any, GroupRows] = {}
        self._pending: deque[PendingCopy] = deque()
        self._schedules: list[Any] | None = None
        self._lock = threading.RLock()

    def tensor(
        self,
        layer: str,
        tensor: str,
        device: torch.device,
        tp_group: Any = None,
        tp_size: int = 1,
    ) -> TensorStatistics | None:
        """The statistics of one tensor of a layer; None where none is configured."""
        key = (layer, tensor, device)
        if key in self._tensors:
            found = self._tensors[key]
        else:
            with self._lock:
                group = self._weight_group(tp_group, tp_size) if tensor == "weight" else None
                found = self._tensors[key] = self._make(layer, tensor, device, group)
        return found

    def _weight_group(self, tp_group: Any, tp_size: int) -> Any:
        reduced = self.weights_over_tp_group and tp_size > 1 and tp_group is not None
        return tp_group if reduced else LOCAL

    def _make(
        self, layer: str, tensor: str, device: torch.device, group: Any
    ) -> TensorStatistics | None:
        subscriptions = self.subscriptions(layer, tensor)
        if not subscriptions:
            return None
        if device not in self._buffers:
            self._buffers[device] = DeviceBuffer(device)
        made = TensorStatistics(layer, tensor, self._buffers[device], subscriptions, group)
        made.schedule(self.iteration)
        for slot in made.slots.values():
            slot.active.fill_(slot.due)
        return made

    def attach(
        self, inner: Quantizer, calls: FeatureCalls, features: Sequence[Any] = ()
    ) -> tuple[Quantizer | None, int | None]:
        """Take statistics beside the work of a quantizer; the routing knows the features.

        Returns:
            What works in its place, None where nothing is due; and the next iteration at which
            that may change, None for never.
        """
        name, device = calls.tensor.name, calls.device
        found = self.tensor(calls.layer, name, device, calls.tp_group, calls.tp_size)
        if found is None:
            return None, None
        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        following = found.next_change(self.iteration)
        if not (found.due or captured):
            return None, following
        return StatisticsQuantizer(inner, found, captured), following

    def subscriptions(self, layer: str, tensor: str) -> list[Subscription]:
        """What the built-in features of all sections want to know of a tensor, in file order."""
        found: list[Subscription] = []
        for routed in self.manager.route(NAMESPACE, layer, "inspect_tensor", tensor):
            if getattr(routed.feature, "built_in_statistics", False):
                found += routed.feature.requested_statistics(routed.config, tensor, routed.schedule)
        return found

    def moved(self) -> None:
        """The training step was set by hand."""
        with self._lock:
            self._begin()

    def _begin(self) -> None:
        self.iteration = self.manager.iteration
        for tensor in self._live():
            tensor.schedule(self.iteration)
        for buffer in self._buffers.values():
            buffer.refresh()

    def _live(self) -> list[TensorStatistics]:
        return [tensor for tensor in list(self._tensors.values()) if tensor is not None]

    def taking(self) -> bool:
        """Whether a layer has run whose statistics are due in this iteration."""
        return any(tensor.due for tensor in self._live())

    def discard(self) -> None:
        """Forget what was taken in this iteration so far."""
        with self._lock:
            for buffer in self._buffers.values():
                buffer.take()
            self._begin()

    def step(self) -> None:
        """End an iteration: send its rows on their way, and log those of earlier ones.

        Raises:
            RuntimeError: the ranks of a group look at different tensors.
        """
        start = time.perf_counter()
        self.stepped = True
        with self._lock:
            try:
                self._send()
            finally:
                self._begin()
            self._log(keep=_MOST_PENDING)
        self.cost.seconds += time.perf_counter() - start

    def _send(self) -> None:
        by_group: dict[Any, list[TensorStatistics]] = {}
        group = self.manager._tensor_reduction_group
        reduces = group_size(group) > 1
        for tensor in self._live():
            own = group if tensor.group is None else tensor.group
            local = own is LOCAL or group_size(own) == 1
            by_group.setdefault(LOCAL if local else own, []).append(tensor)
        if reduces and self._may_be_due():
            by_group.setdefault(group, [])
        elif reduces:
            by_group.pop(group, None)
        sent = {
            key: tensors
            for key, tensors in by_group.items()
            if any(t.due for t in tensors) or (reduces and key is group)
        }
        if not sent:
            return
        self.cost.steps += 1
        taken = {device: buffer.take() for device, buffer in self._buffers.items()}
        for key, tensors in sent.items():
            if key is LOCAL:
                self._send_local(tensors, taken)
            else:
                self._send_group(key, tensors, taken)

    def _may_be_due(self) -> bool:
        """Whether the text of the configuration says so: the same on all ranks that share it."""
        if self._schedules is None:
            self._schedules = [
                schedule
                for feature in BUILT_IN
                for tensor, schedule in self.manager.schedules(feature)
                if tensor != "weight"
            ]
        return any(schedule.due(self.iteration) for schedule in self._schedules)

    def _add_pending(self, copy: PendingCopy) -> None:
        self.cost.bytes += copy.nbytes
        self._pending.append(copy)

    def _send_local(
        self, tensors: list[TensorStatistics], taken: dict[torch.device, torch.Tensor]
    ) -> None:
        for device, rows in taken.items():
            due = _due(t for t in tensors if t.buffer.device == device)
            if due:
                self._add_pending(PendingCopy(rows, self.iteration, due))

    def _send_group(
        self,
        group: Any,
        tensors: list[TensorStatistics],
        taken: dict[torch.device, torch.Tensor],
    ) -> None:
        if group not in self._groups:
            self._groups[group] = GroupRows(group, digest(str(self.manager.config_hash)))
        together = self._groups[group]
        self._log(keep=0)  # the headers of the step before decide whether ranks still agree
        layout = together.layout(tensors)
        gathered = together.gather(layout, taken, self.iteration)
        self.cost.collectives += 1
        self._add_pending(PendingCopy(gathered, self.iteration, _due(tensors), (together, layout)))

    def _log(self, keep: int) -> None:
        """Log what has arrived; waits for all but the last `keep` steps."""
        while self._pending and self._pending[0].is_ready(wait=len(self._pending) > keep):
            copy = self._pending.popleft()
            for layer, tensor, values in copy.statistics():
                self.manager.log_statistics(copy.iteration, layer, tensor, values)

    def drain(self) -> None:
        """Log everything that was sent; waits for the device."""
        with self._lock:
            self._log(keep=0)

    def end(self) -> None:
        """The session is over: log what is left, and let captured graphs write nothing more."""
        try:
            self.drain()
        finally:
            for tensor in self._live():
                tensor.clear()
            for buffer in self._buffers.values():
                buffer.close()


def _due(tensors: Iterable[TensorStatistics]) -> list[Due]:
    return [Due(t.layer, t.tensor, readings) for t in tensors if (readings := t.ended())]
