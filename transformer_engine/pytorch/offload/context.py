"""`get_cpu_offload_context`: tensors that layers save for the backward are kept in host memory.

Hooks on saved tensors collect what each layer saves in a `Group`. When a layer has run, its group
is copied to the host; some layers later, the group's memory on the device is freed. In the
backward, groups are copied back some layers before they are needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from transformer_engine.pytorch._torch_private import graph_task
from transformer_engine.pytorch.module.arguments import check_sizes
from transformer_engine.pytorch.module.inputs import check_tensors
from transformer_engine.pytorch.offload.groups import CudaCopies, Group, View

# Smaller tensors stay where they are: scales, seeds, statistics of a norm over few tokens. To start
# a copy takes the host some microseconds, while PCIe moves this many bytes in less than one.
LEAST_BYTES = 16 * 1024
Sync = Callable[..., Any]


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = True,
    *,
    model_layers: int | None = None,
    double_buffering: bool = True,
    offload_stream: Any = None,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
) -> tuple[AbstractContextManager[Any], Sync]:
    """Keep activations in host memory from the forward of a layer to its backward.

    Copies run on separate streams, at the same time as the computation. The layers that share one
    context are offloaded in the order in which they run: copies of the first `num_layers` layers
    are spread over the forward of all layers, and the copies back over the backward. Gradients are
    the same, bit for bit. Without a GPU the same calls do nothing.

    Args:
        enabled: False gives a context and a function that do nothing.
        num_layers: how many layers are offloaded; the first ones.
        offload_activations: copy what layers save of their inputs and between their operations.
        offload_weights: copy FP8 casts of weights that are saved for the backward too. Parameters
            stay where they are.
        model_layers: how many layers run in the context; None learns it from the first step.
        double_buffering: accepted; copies always overlap with the computation.
        offload_stream: CUDA stream of the copies to the host; None makes one.
        manual_synchronization: must be False; control of copies by the caller is not implemented.
        retain_pinned_cpu_buffers: accepted; host memory is always kept from step to step.

    Returns:
        A context, in which the forward of every layer must run, and a function, which must be
        called after each layer: with the layer's output, which it returns, or without arguments.

    Raises:
        TypeError: numbers of layers that are not ints.
        ValueError: nothing to offload, or fewer layers in the model than offloaded ones.
        NotImplementedError: `manual_synchronization`.

    >>> import torch
    >>> import transformer_engine.pytorch as te
    >>> layers = [te.Linear(16, 16, device="cpu") for _ in range(3)]
    >>> context, synchronize = te.get_cpu_offload_context(enabled=True, num_layers=2)
    >>> x = torch.ones(16, 16, requires_grad=True)
    >>> for layer in layers:
    ...     with context:
    ...         x = layer(x)
    ...     x = synchronize(x)
    >>> x.sum().backward()
    """
    if manual_synchronization:
        raise NotImplementedError(
            "[cpu_offload] manual_synchronization=True is not implemented yet, only False is"
        )
    if not (offload_activations or offload_weights):
        raise ValueError(
            "[cpu_offload] expected offload_activations or offload_weights, got neither"
        )
    check_sizes("cpu_offload", None, num_layers=num_layers)
    if model_layers is not None:
        check_sizes("cpu_offload", None, num_layers, model_layers=model_layers)
    if not (enabled and torch.cuda.is_available()):
        nothing: Any = nullcontext()  # torch.compile can trace it
        nothing.inside_context = False
        return nothing, _same
    copies = CudaCopies(offload_stream)
    offload = Offload(num_layers, model_layers, offload_activations, offload_weights, copies)
    return offload, offload.synchronize


def mark_not_offload(*tensors: torch.Tensor) -> None:
    """Keep tensors on their device, even if they are saved in an offloading context.

    Args:
        tensors: the tensors; these objects are marked, not views of them.

    Raises:
        TypeError: an argument that is not a tensor.

    >>> import torch
    >>> mark_not_offload(torch.ones(2), torch.ones(3))
    """
    for tensor in tensors:
        check_tensors("mark_not_offload", tensors=tensor)
        tensor.never_offloaded = True  # type: ignore[attr-defined]


def _same(output: Any = None) -> Any:
    return output


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
