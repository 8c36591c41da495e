"""`get_cpu_offload_context`: tensors that layers save for the backward are kept in host memory."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from transformer_engine.pytorch.module.arguments import check_sizes
from transformer_engine.pytorch.module.inputs import check_tensors
from transformer_engine.pytorch.offload.groups import CudaCopies
from transformer_engine.pytorch.offload.manual import ManualOffload, ManualOffloadSynchronizer
from transformer_engine.pytorch.offload.offload import Offload


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
) -> tuple[Any, ...]:
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
        manual_synchronization: copy nothing until the caller says so by the third result;
            `num_layers` has no effect.
        retain_pinned_cpu_buffers: accepted; host memory is always kept from step to step.

    Returns:
        A context, in which the forward of every layer must run, and a function, which must be
        called after each layer: with the layer's output, which it returns, or without arguments.
        With `manual_synchronization` also a `ManualOffloadSynchronizer`.

    Raises:
        TypeError: numbers of layers that are not ints.
        ValueError: nothing to offload, or fewer layers in the model than offloaded ones.

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
        idle = (ManualOffloadSynchronizer(None),) if manual_synchronization else ()
        return (nothing, _same, *idle)
    wanted = model_layers, offload_activations, offload_weights, CudaCopies(offload_stream)
    if manual_synchronization:
        manual = ManualOffload(*wanted)
        return manual, manual.synchronize, ManualOffloadSynchronizer(manual)
    offload = Offload(num_layers, *wanted)
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
