"""`get_cpu_offload_context` with its arguments in the order of newer versions."""

from __future__ import annotations

from typing import Any

from transformer_engine.pytorch.offload import context

__all__ = ["get_cpu_offload_context"]


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
) -> tuple[Any, ...]:
    """`transformer_engine.pytorch.get_cpu_offload_context` with arguments in another order.

    Args:
        enabled: offload; if False, the other arguments are ignored.
        num_layers: how many layers are offloaded.
        model_layers: how many layers the model has.
        offload_activations: offload activations.
        offload_weights: offload weights too.
        double_buffering: accepted; copies always overlap with the computation.
        manual_synchronization: return a `ManualOffloadSynchronizer`, too.
        retain_pinned_cpu_buffers: accepted; host memory is always kept from step to step.
        offload_stream: CUDA stream of the copies to the host.
    """
    if not enabled:
        return context.get_cpu_offload_context(manual_synchronization=manual_synchronization)
    return context.get_cpu_offload_context(
        enabled,
        num_layers,
        offload_activations,
        offload_weights,
        model_layers=model_layers,
        double_buffering=double_buffering,
        offload_stream=offload_stream,
        manual_synchronization=manual_synchronization,
        retain_pinned_cpu_buffers=retain_pinned_cpu_buffers,
    )
