"""Offloading: activations are kept in host memory between forward and backward."""

from transformer_engine.pytorch.offload.context import get_cpu_offload_context, mark_not_offload

__all__ = ["get_cpu_offload_context", "mark_not_offload"]
