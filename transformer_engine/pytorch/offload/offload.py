"""`Offload`, the context in which layers run: when their saved tensors are copied.

Hooks on saved tensors collect what each layer saves in a `Group`. When a layer has run, its group
is copied to the host; some layers later, the group's memory on the device is freed. In the
backward, groups are copied back some layers before they are needed.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import nn

from transformer_engine.pytorch._torch_private import graph_task
from transformer_engine.pytorch.offload.groups import CudaCopies, Group, View

# Smaller tensors stay where they are: scales, seeds, statistics of a norm over few tokens. To start
# a copy takes the host some microseconds, while PCIe moves this many bytes in less than one.
LEAST_BYTES = 16 * 1024


class OnDevice(NamedTuple):
    """A saved tensor that stays on the device, with the group of its layer."""

    group: Group
    x: torch.Tensor

    def tensor(self) -> torch.Tensor:
        """The tensor."""
        return self.x


class Offload:
    """The context, one object for all layers of a model; `model_layers` is None until counted."""

    inside_context = False  # whether it is open, for Megatron-Core

    def __init__(
        self,
        layers: int,
        model_layers: int | None,
        activations: bool,
        weights: bool,
        copies: CudaCopies,
    ) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self.layers = layers
        self.model_layers = model_layers
        self.activations = activations
        self.weights = weights
        self.copies = copies
        self._open: Group | None = None  # the group of the layer that is running
        self._groups: list[weakref.ref[Group]] = []
        self._coming: list[Group] = []  # groups that are being copied back
        self._backward = False

    def __enter__(self) -> None:
        if self._backward or not any(group() for group in self._groups):
            self._restart()
        self._hooks.__enter__()
        self.inside_context = True

    def __exit__(self, *exception: Any) -> None:
        self.inside_context = False
        self._hooks.__exit__(*exception)

    def _restart(self) -> None:
        """Start a new forward; after a backward, the number of layers is known."""
        if self._backward:
            self.model_layers = max(len(self._groups), 1)
        for group in self._coming:
            group.arrive()
        self._coming, self._groups, self._backward = [], [], False

    def _group(self) -> Group:
        if self._open is None:
            self._open = Group(len(self._groups), self.copies)
            self._groups.append(weakref.ref(self._open))
        return self._open

    def due(self, index: int) -> int:
        """The layer after which the device memory of layer `index` is freed.

        The copies of each offloaded layer get an equal share of the forward to run in. The last
        layer of the model cannot be offloaded, because no layer follows it.
        """
        layers = self.model_layers or self.layers
        share = (layers - 1) / min(self.layers, layers)
        return max(index + 1, int(-(-(index + 1) * share // 1)))

    def _sends(self, index: int) -> bool:
        unknown = self.model_layers is None
        return index < self.layers and (unknown or self.due(index) < self.model_layers)  # type: ignore[operator]

    def pack(self, x: torch.Tensor) -> Any:
        """The object that autograd saves in place of a tensor."""
        if graph_task() != -1:  # a recompute, whose saved tensors are needed at once
            return x
        group = self._group()
        return group.save(x) if self._sends(group.index) and self._takes(x) else OnDevice(group, x)

    pack.separate_tensors = True  # type: ignore[attr-defined]  # weights not among activations

    def _takes(self, x: torch.Tensor) -> bool:
        wanted = self.weights if getattr(x, "weight_offloading", False) else self.activations
        origin = x if x._base is None else x._base  # nn.Linear saves a view of its weight
        return (
            wanted
            and type(x) is torch.Tensor
            and not isinstance(origin, nn.Parameter)
            and not (x.is_conj() or x.is_neg())  # which the memory does not say
            and x.numel() * x.itemsize >= LEAST_BYTES
            and x.layout is torch.strided
            and not getattr(x, "never_offloaded", False)
            and self.copies.takes(x)
        )

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor for an object that `pack` returned."""
        if isinstance(saved, torch.Tensor):
            return saved
        view: View | OnDevice = saved
        if not view.group.entered:
            self._enter(view.group)
        return view.tensor()

    def _enter(self, group: Group) -> None:
        """Called when the backward of a layer begins: start to copy earlier layers back."""
        group.arrive()
        if not any(ref() is group for ref in self._groups):
            return  # the group is of an earlier forward
        self._backward = True
        self._coming = [other for other in self._coming if other is not group]
        for index, ref in enumerate(self._groups[: group.index]):
            other = ref()
            if other is not None and self.due(index) >= group.index and other.bring_back():
                self._coming.append(other)

    def synchronize(self, output: Any = None) -> Any:
        """Called after a layer has run: start the layer's copies, and free those that are due."""
        if not torch.is_grad_enabled() or graph_task() != -1:
            return output
        group = self._group()
        self._open = None
        if self._sends(group.index):
            group.send()
        else:
            group.keep()
        for index, ref in enumerate(self._groups):
            other = ref()
            if other is not None and self.due(index) <= group.index:
                other.let_go()
        return output
