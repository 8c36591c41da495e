"""Optimizers, and operations on lists of tensors, under the names that training programs import.

They run on the fused and foreach kernels of torch, and `FusedAdam` with `capturable` on a kernel of
this package. Optimizers of torch can step all parameters of this package, also those in FP8.
"""

from transformer_engine.pytorch.optimizers.clipping import clip_factor
from transformer_engine.pytorch.optimizers.fused_adam import FusedAdam
from transformer_engine.pytorch.optimizers.fused_sgd import FusedSGD
from transformer_engine.pytorch.optimizers.multi_tensor_apply import (
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
)

__all__ = [
    "FusedAdam",
    "FusedSGD",
    "clip_factor",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
]
