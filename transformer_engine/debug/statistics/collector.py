"""All statistics of a session: which tensors are looked at, when, and the end of every step."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nvdlfw_inspect.utils import warn_user
from transformer_engine.debug.names import NAMESPACE
from transformer_engine.debug.shared_amax import SharedAmax
from transformer_engine.debug.statistics.buffer import DeviceBuffer
from transformer_engine.debug.statistics.feeds import TensorName
from transformer_engine.debug.statistics.layout import digest
from transformer_engine.debug.statistics.pending import Due, PendingCopy
from transformer_engine.debug.statistics.quantizer import StatisticsQuantizer
from transformer_engine.debug.statistics.ranks import RanksDifferError
from transformer_engine.debug.statistics.reductions import LOCAL, Reductions, any_due
from transformer_engine.debug.statistics.subscription import Subscription
from transformer_engine.debug.statistics.tensor import TensorStatistics
from transformer_engine.pytorch.parallel.meeting import group_or_world_size, ranks_of

if TYPE_CHECKING:
    from transformer_engine.debug.calls import FeatureCalls
    from transformer_engine.pytorch.fp8.quantizers import Quantizer

_Key = tuple[str, str, torch.device]  # layer, tensor, where it is
_MOST_PENDING = 64  # steps in flight before one is waited for


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
        self.shared_amax = SharedAmax(digest(str(manager.config_hash)))
        self._tensors: dict[_Key, TensorStatistics | None] = {}
        # Modules that a tensor belongs to; those of hooks called by hand have none.
        self._owners: dict[_Key, weakref.WeakSet[torch.nn.Module]] = {}
        self._looked_through = 0  # tensors, for modules that are gone
        self._buffers: dict[torch.device, DeviceBuffer] = {}
        self._reductions = Reductions(manager, self._live, self.tensor)
        self._pending: deque[PendingCopy] = deque()
        self._lock = threading.RLock()
        self._reasons: set[str] = set()  # why statistics could not be taken

    def tensor(
        self,
        layer: str,
        tensor: str,
        device: torch.device,
        tp_group: Any = None,
        tp_size: int = 1,
        replicated: bool = False,
    ) -> TensorStatistics | None:
        """The statistics of one tensor of a layer; None where none is configured.

        Args:
            layer: name of the layer.
            tensor: which of its tensors.
            device: where it is.
            tp_group: tensor parallel group of the layer, None without.
            tp_size: its size.
            replicated: all ranks of that group have the same tensor: it counts once.
        """
        key = (layer, tensor, device)
        if key in self._tensors:
            found = self._tensors[key]
        else:
            with self._lock:
                group = self._weight_group(tp_group, tp_size) if tensor == "weight" else None
                found = self._tensors[key] = self._make(layer, tensor, device, group)
                if found is not None and tp_size > 1 and tp_group is not None:
                    self._share(found, tp_group, replicated)
        return found

    def _share(self, tensor: TensorStatistics, tp_group: Any, replicated: bool) -> None:
        """Tell a tensor that other ranks have parts of it, or all of it too."""
        if group_or_world_size(tp_group) == 1:
            return
        tensor.replicas = ranks_of(tp_group) if replicated else ()
        if tensor.group is not LOCAL and not replicated:
            what = f"layer {tensor.layer}, tensor {tensor.tensor}"
            whole = functools.partial(self.shared_amax.of, what=what, groups=(tp_group,))
            tensor.name = TensorName(tensor.layer, tensor.tensor, whole)

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
        made = TensorStatistics(
            layer, tensor, self._buffers[device], subscriptions, group, self._skip
        )
        made.schedule(self.iteration)
        for slot in made.slots.values():
            slot.active.fill_(slot.due)
        return made

    def _skip(self, layer: str, tensor: str, reason: str) -> None:
        """Log that a tensor has no statistics; of all with this reason, warn of the first."""
        text = f"Skipping stats collection for layer {layer}, tensor {tensor}: {reason}"
        self.manager.log_message(text)
        if reason not in self._reasons:
            self._reasons.add(reason)
            self.manager.silence.skipped.append(text)
            warn_user(f"[LogFp8TensorStats] {text}; the debug log names all such tensors")

    def attach(
        self,
        inner: Quantizer,
        calls: FeatureCalls,
        features: Sequence[Any] = (),
        owner: torch.nn.Module | None = None,
    ) -> tuple[StatisticsQuantizer | None, int | None]:
        """Take statistics beside the work of a quantizer; the routing knows the features.

        Once all owners of a tensor are gone, it is forgotten at the end of the step.

        Returns:
            What works in its place, None where nothing is due; and the next iteration at which
            that may change, None for never.
        """
        name, device = calls.tensor.name, calls.device
        found = self.tensor(
            calls.layer, name, device, calls.tp_group, calls.tp_size, calls.replicated
        )
        if found is None:
            return None, None
        if owner is not None:
            key = (calls.layer, name, device)
            self._owners.setdefault(key, weakref.WeakSet()).add(owner)
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

    def _forget(self) -> None:
        """Drop tensors of modules that are gone: a layer of each step would pile them up.

        Those that ranks reduce stay, because garbage is not collected on all ranks at once, and
        those whose rows captured graphs may hold.
        """
        if len(self._tensors) == self._looked_through:  # no layer has come
            return
        local = self._reductions.by_group().get(LOCAL, ())
        gone = [key for key, owners in self._owners.items() if not owners]
        for key in gone:
            found = self._tensors.get(key)
            if found is None or (found in local and not found.buffer.captured):
                del self._owners[key], self._tensors[key]
                if found is not None:
                    found.free()
        self._looked_through = len(self._tensors)

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
                self._forget()
                self._begin()
            self._log(keep=_MOST_PENDING)
        self.cost.seconds += time.perf_counter() - start

    def _send(self) -> None:
        reductions = self._reductions
        reductions.meet(self.iteration)
        if reductions.due(self.iteration):
            self._log(keep=0)  # the headers of the step before decide whether ranks still agree
        sent = reductions.due(self.iteration)
        local = reductions.by_group().get(LOCAL, ())
        if not (sent or any_due(local)):
            return
        self.cost.steps += 1
        taken = {device: buffer.take() for device, buffer in self._buffers.items()}
        self._send_local(local, taken)
        for key, tensors in sent.items():
            self._send_group(key, tensors, taken)

    def _add_pending(self, copy: PendingCopy) -> None:
        self.cost.bytes += copy.nbytes
        self._pending.append(copy)

    def _send_local(
        self, tensors: Sequence[TensorStatistics], taken: dict[torch.device, torch.Tensor]
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
        together = self._reductions.rows_of(group)
        layout = together.layout(tensors)
        gathered = together.gather(layout, taken, self.iteration)
        self.cost.collectives += 1
        self._add_pending(PendingCopy(gathered, self.iteration, _due(tensors), (together, layout)))

    def _log(self, keep: int) -> None:
        """Log what has arrived; waits for all but the last `keep` steps."""
        while self._pending and self._pending[0].is_ready(wait=len(self._pending) > keep):
            copy = self._pending.popleft()
            try:
                found = [*copy.statistics()]
            except RanksDifferError:
                assert copy.shared is not None
                group, layout = copy.shared[0].group, copy.shared[1]
                found = [*copy.statistics(self._reductions.agree(group, self.iteration, layout))]
            for layer, tensor, values in found:
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
            self._reductions.check()


def _due(tensors: Iterable[TensorStatistics]) -> list[Due]:
    return [Due(t.layer, t.tensor, readings) for t in tensors if (readings := t.ended())]
