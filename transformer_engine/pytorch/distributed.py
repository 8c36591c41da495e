"""The documented import path of what serves distributed training."""

from transformer_engine.pytorch.checkpointing import checkpoint
from transformer_engine.pytorch.rng import CudaRNGStatesTracker, graph_safe_rng_available

__all__ = ["CudaRNGStatesTracker", "checkpoint", "graph_safe_rng_available"]
