"""`Collector`: takes, reduces and logs all built-in statistics of a session.

In an iteration, kernels merge the moments of tensors into rows on the device. `step` copies these
rows, resets them, gathers rows that ranks share by one collective for each group, and starts a copy
to the host. It does not wait for that copy: a later `step`, or `drain`, logs it.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nvdlfw_inspect.utils import run_all, warn_user
from transformer_engine.debug.names import NAMESPACE
from transformer_engine.debug.plans import taken_by_kernels
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
    from transformer_engine.pytorch.fp8.casts.quantizers import Quantizer

_Key = tuple[str, str, torch.device]  # layer, tensor, device of the tensor
_MOST_PENDING = 64  # copies in flight before `step` waits for the oldest one


_collectors: weakref.WeakSet[Collector] = weakref.WeakSet()


def _forked() -> None:
    """Called in forked children: a thread that does not exist there may hold a lock."""
    for one in _collectors:
        one._lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)


@dataclass
class CostCounter:
    """What the statistics have cost so far."""

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
    """The built-in statistics of one session.

    For `weights_over_tp_group` see `debug.set_weight_tensor_tp_group_reduce`.
    """

    def __init__(self, manager: Any, weights_over_tp_group: bool = True) -> None:
        self.manager = manager
        self.iteration: int = manager.iteration
        self.stepped = False  # whether `step` was ever called
        self.cost = CostCounter()
        self.weights_over_tp_group = weights_over_tp_group
        self.shared_amax = SharedAmax(digest(str(manager.config_hash)))
        self._tensors: dict[_Key, TensorStatistics | None] = {}
        # The modules of a tensor. A tensor that the program passes to a feature itself has none.
        self._owners: dict[_Key, weakref.WeakSet[torch.nn.Module]] = {}
        self._learned: set[_Key] = set()  # the tensor parallel group of their layers is unknown
        self._tensors_checked = 0  # len(_tensors) when `_forget` last looked
        self._buffers: dict[torch.device, DeviceBuffer] = {}
        self._reductions = Reductions(manager, self._live, self._learn)
        self._pending: deque[PendingCopy] = deque()
        self._finished: list[tuple[int, str, str, Any]] = []  # arguments of `log_statistics`
        self._lock = threading.RLock()
        _collectors.add(self)
        self._reasons: set[str] = set()  # why statistics could not be taken
        self._missed: tuple[str, str] | None = None  # layer, and a part of the warning
        self.forwards: dict[str, int] = {}  # of layers in compiled code, see `Feed`

    def tensor(
        self,
        layer: str,
        tensor: str,
        device: torch.device,
        tp_group: Any = None,
        tp_size: int = 1,
        replicated: bool = False,
    ) -> TensorStatistics | None:
        """Return the statistics of one tensor of a layer; None if none are configured.

        If the tensor is `replicated`, all ranks of `tp_group` have it, and it counts once.
        """
        key = (layer, tensor, device)
        if key in self._tensors and key not in self._learned:
            return self._tensors[key]
        with self._lock:
            new = key not in self._tensors  # False: learned, or made by another thread meanwhile
            shared, group = tp_size > 1 and tp_group is not None, None
            if tensor == "weight":
                group = tp_group if shared and self.weights_over_tp_group else LOCAL
            found = self._make(layer, tensor, device, group) if new else self._tensors[key]
            if found is not None and shared and (new or key in self._learned):
                self._share(found, tp_group, replicated)
            self._tensors[key] = found
            self._learned.discard(key)
            return found

    def _learn(self, layer: str, tensor: str, device: torch.device) -> None:
        """Make the statistics of a tensor of a layer that has run on other ranks only."""
        with self._lock:
            if (layer, tensor, device) not in self._tensors:
                self.tensor(layer, tensor, device)
                self._learned.add((layer, tensor, device))

    def of_call(
        self, feature: Any, layer: str, tensor: str, device: torch.device, *ranks: Any
    ) -> TensorStatistics | None:
        """Return the statistics to which a call of a feature adds a tensor.

        Returns None if nothing is due, and for a subclass of a built-in feature if a built-in
        feature is due for the same tensor: both share these statistics, and kernels have added the
        tensor already. `ranks` are the tensor parallel group and its size.
        """
        if not taken_by_kernels(feature):
            target = (layer, tensor, None)
            routed = self.manager.active(self.iteration, NAMESPACE, "inspect_tensor", *target)
            if any(taken_by_kernels(one.feature) for one in routed):
                return None
        found = self.tensor(layer, tensor, device, *ranks)
        return found if found is not None and found.due else None

    def _share(self, tensor: TensorStatistics, tp_group: Any, replicated: bool) -> None:
        """Store which ranks have copies of a tensor, or how to get the amax of all its shards."""
        if group_or_world_size(tp_group) == 1:
            return
        tensor.replicas = ranks_of(tp_group) if replicated else ()
        if tensor.group is not LOCAL and not replicated:
            what = f"layer {tensor.layer}, tensor {tensor.tensor}"
            whole = functools.partial(self.shared_amax.of, what=what, groups=(tp_group,))
            tensor.name = TensorName(tensor.layer, tensor.tensor, whole)

    def _make(
        self, layer: str, tensor: str, device: torch.device, group: Any
    ) -> TensorStatistics | None:
        subscriptions = self.subscriptions(layer, tensor)
        if not subscriptions or device.type == "meta":
            return None
        if device not in self._buffers:
            self._buffers[device] = DeviceBuffer(device)
        made = TensorStatistics(
            layer, tensor, self._buffers[device], subscriptions, group, self._skip, self.missed
        )
        made.schedule(self.iteration)
        for slot in made.slots.values():
            slot.active.fill_(slot.due)
        return made

    def _skip(self, layer: str, tensor: str, reason: str) -> None:
        """Log that a statistic of a tensor cannot be taken, and warn once for each reason."""
        text = f"Skipping stats collection for layer {layer}, tensor {tensor}: {reason}"
        self.manager.log_message(text)
        if reason not in self._reasons:
            self._reasons.add(reason)
            self.manager.silence.skipped.append(text)
            warn_user(f"[LogFp8TensorStats] {text}; the debug log names all such tensors")

    def missed(self, layer: str, tensor: str) -> None:
        """Called if features that are due in the forward's iteration miss a tensor of a backward.

        The backward may run in a thread that outlives the session, so `step` and `end` warn of it.
        """
        if not self._missed:
            self._missed = layer, f"{self.iteration}, miss {tensor}"

    def _tell_of_missed(self) -> None:
        if self._missed:
            layer, rest = self._missed
            text = (
                "[step] expected debug_api.step() after each backward pass, got it between a"
                " forward and its backward: features that are due in the iteration of the forward,"
                f" but not in iteration {rest}"
            )
            self.manager.log_message(text, layer, logging.WARNING, once="missed by features")

    def attach(
        self,
        inner: Quantizer,
        calls: FeatureCalls,
        features: Sequence[Any] = (),
        owner: torch.nn.Module | None = None,
    ) -> tuple[StatisticsQuantizer | None, int | None]:
        """Wrap a quantizer so that it takes the statistics of its tensor.

        Args:
            inner: the quantizer.
            calls: names the layer and the tensor.
            features: not used: `subscriptions` asks the manager for them.
            owner: module of the tensor. When all owners have been deleted, `step` drops the tensor.

        Returns:
            The wrapped quantizer, None if nothing is due; and the next iteration at which this may
            change, None for never.
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
        """Return what all sections of the configuration request for a tensor, in file order."""
        found: list[Subscription] = []
        for routed in self.manager.route(NAMESPACE, layer, "inspect_tensor", tensor):
            if getattr(routed.feature, "built_in_statistics", False):
                requested = routed.feature.requested_statistics
                found += requested(routed.config, layer, tensor, routed.schedule)
        return found

    def moved(self) -> None:
        """Called when the program sets the iteration: what was taken in another does not count."""
        if self.manager.iteration != self.iteration:
            self.discard()

    def _begin(self) -> None:
        self.iteration = self.manager.iteration
        for tensor in self._live():
            tensor.schedule(self.iteration)
        for buffer in self._buffers.values():
            buffer.refresh()

    def _forget(self) -> None:
        """Drop the tensors of deleted modules, so that programs may create layers in every step.

        Tensors whose rows are reduced over ranks stay, because ranks delete modules at different
        times. Tensors that a compiled or captured graph may feed stay, too.
        """
        if len(self._tensors) == self._tensors_checked:  # no layer is new
            return
        local = self._reductions.by_group().get(LOCAL, ())
        gone = [key for key, owners in self._owners.items() if not owners]
        for key in gone:
            found = self._tensors.get(key)
            in_graph = found is not None and (found.in_graph or found.buffer.captured)
            if found is None or (found in local and not in_graph):
                del self._owners[key], self._tensors[key]
                if found is not None:
                    found.free()
        self._tensors_checked = len(self._tensors)

    def _live(self) -> list[TensorStatistics]:
        return [tensor for tensor in list(self._tensors.values()) if tensor is not None]

    def taking(self) -> bool:
        """Whether statistics of a layer that has run are due in this iteration."""
        return any(tensor.due for tensor in self._live())

    def discard(self) -> None:
        """Drop the statistics that were taken in this iteration so far."""
        with self._lock:
            for buffer in self._buffers.values():
                buffer.take()
            self._begin()

    def step(self) -> None:
        """End an iteration: start the copy of its rows, and log rows of earlier ones.

        Raises:
            RuntimeError: the ranks of a group take statistics of different tensors.
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
            self._tell_of_missed()
        self.cost.seconds += time.perf_counter() - start

    def _send(self) -> None:
        reductions = self._reductions
        reductions.meet(self.iteration)
        if reductions.due(self.iteration):
            # Headers of the last step show whether ranks still agree. `step` logs the statistics
            # after the collectives, from which an error of a logger must not keep this rank.
            self._read(keep=0)
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
        """Log finished copies, after waiting until at most `keep` are unfinished.

        An error of a logger is raised after all copies have been logged.
        """
        try:
            self._read(keep)
        finally:
            finished, self._finished = self._finished, []
            run_all(functools.partial(self.manager.log_statistics, *one) for one in finished)

    def _read(self, keep: int) -> None:
        """Read the statistics of finished copies, see `_log`."""
        while self._pending and self._pending[0].is_ready(wait=len(self._pending) > keep):
            copy = self._pending.popleft()
            try:
                found = [*copy.statistics()]
            except RanksDifferError:
                assert copy.shared is not None
                group, layout = copy.shared[0].group, copy.shared[1]
                found = [*copy.statistics(self._reductions.agree(group, self.iteration, layout))]
            self._finished += [(copy.iteration, *one) for one in found]

    def drain(self) -> None:
        """Wait for all copies and log them."""
        with self._lock:
            self._log(keep=0)

    def end(self) -> None:
        """End the session: log the remaining rows, and keep captured graphs from writing rows."""
        try:
            self.drain()
        finally:
            for tensor in self._live():
                tensor.clear()
            for buffer in self._buffers.values():
                buffer.close()
            self._reductions.check()
            self._tell_of_missed()


def _due(tensors: Iterable[TensorStatistics]) -> list[Due]:
    return [Due(t.layer, t.tensor, readings) for t in tensors if (readings := t.ended())]
