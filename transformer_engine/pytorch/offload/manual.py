"""Offloading in which the caller starts the copies of each layer, as pipeline schedules need."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from transformer_engine.pytorch._torch_private import graph_task
from transformer_engine.pytorch.offload.groups import CudaCopies, Group
from transformer_engine.pytorch.offload.offload import Offload

_SAVED, _COPIED, _FREED, _RETURNED = "on the device", "copied", "freed", "copied back"


class ManualOffload(Offload):
    """An `Offload` that copies nothing by itself; every layer can be offloaded."""

    def __init__(
        self, model_layers: int | None, activations: bool, weights: bool, copies: CudaCopies
    ) -> None:
        super().__init__(1, model_layers, activations, weights, copies)

    def _sends(self, index: int) -> bool:
        return True

    def _enter(self, group: Group) -> None:
        group.arrive()

    def synchronize(self, output: Any = None) -> Any:
        """Called after a layer has run: what is saved from now on belongs to the next one."""
        if torch.is_grad_enabled() and graph_task() == -1:
            self._group()
            self._open = None
        return output

    def group_of(self, layer: int) -> Group | None:
        """The last group of a layer that has run; None if its saved tensors are gone.

        Raises:
            ValueError: no such layer has run.
            RuntimeError: the layer is still running.
        """
        count = len(self._groups)
        numbers = [n for n in range(count) if layer == n % (self.model_layers or count)]
        if not numbers:
            raise ValueError(
                "[cpu_offload] expected the number of a layer that has run in the context, below"
                f" {min(count, self.model_layers or count)}, got {layer}"
            )
        found = self._groups[numbers[-1]]()
        if found is not None and found is self._open:
            raise RuntimeError(
                "[cpu_offload] expected a call of the synchronization function after the layer,"
                f" got none (layer {layer})"
            )
        return found


class ManualOffloadSynchronizer:
    """Moves what layers have saved for the backward to the host and back.

    Layers are numbered from 0 in the order in which they run. The numbers start again after
    `model_layers` layers, or, without `model_layers`, once no layer has saved tensors. A number
    stands for the last run. Each method returns at once, and is called at most once for each run of
    a layer, in the order below. A layer for which none is called stays on the device. The backward
    of a layer waits for its tensors, and copies back what `start_reload_layer` has not.

    >>> import transformer_engine.pytorch as te
    >>> context, sync, copies = te.get_cpu_offload_context(True, manual_synchronization=True)
    >>> with context:
    ...     y = te.Linear(16, 16, device="cpu")(torch.ones(16, 16))
    >>> y = sync(y)
    >>> copies.start_offload_layer(0)
    >>> copies.release_activation_forward_gpu_memory(0)
    >>> copies.start_reload_layer(0)
    >>> y.sum().backward()
    """

    def __init__(self, offload: ManualOffload | None) -> None:
        self._offload = offload
        self._states: weakref.WeakKeyDictionary[Group, str] = weakref.WeakKeyDictionary()

    def start_offload_layer(self, layer_id: int) -> None:
        """Start to copy the layer's tensors to the host, on the offload stream.

        Args:
            layer_id: number of the layer.

        Raises:
            ValueError: no such layer has run.
            RuntimeError: calls in another order.
        """
        self._move(layer_id, Group.send, _SAVED, _COPIED)

    def release_activation_forward_gpu_memory(self, layer_id: int) -> None:
        """Let the computing stream wait for the copies to the host, and free the device's memory.

        Args:
            layer_id: number of the layer.

        Raises:
            ValueError: no such layer has run.
            RuntimeError: calls in another order; a tensor was changed in place since it was saved.
        """
        self._move(layer_id, Group.let_go, _COPIED, _FREED)

    def start_reload_layer(self, layer_id: int) -> None:
        """Start to copy the layer's tensors back.

        Args:
            layer_id: number of the layer.

        Raises:
            ValueError: no such layer has run.
            RuntimeError: calls in another order.
        """
        self._move(layer_id, Group.bring_back, _FREED, _RETURNED)

    def _move(self, layer: int, move: Callable[[Group], object], expected: str, after: str) -> None:
        """Move the group of a layer from one state to the next, if there is something to do."""
        group = None if self._offload is None else self._offload.group_of(layer)
        if group is None or group.entered:
            return
        state = self._states.get(group, _SAVED)
        if state != expected:
            raise RuntimeError(
                f"[cpu_offload] expected layer {layer} to be {expected}, got one that is {state}:"
                " call start_offload_layer, release_activation_forward_gpu_memory and"
                " start_reload_layer in this order"
            )
        self._states[group] = after
        move(group)
