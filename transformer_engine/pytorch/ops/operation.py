"""What operations have in common, and the container that runs them."""

from __future__ import annotations

from torch import nn


class FusibleOperation(nn.Module):
    """Base of the operations here: modules of one tensor that know nothing of their neighbours."""


class Sequential(nn.Sequential):
    """Runs operations, or any modules, one after another; as `torch.nn.Sequential` otherwise.

    Each runs kernels of its own. `LayerNormMLP` and `LayerNormLinear` are the fused forms of the
    usual sequences: there the kernels of norms and activations cast to FP8 themselves.
    """
