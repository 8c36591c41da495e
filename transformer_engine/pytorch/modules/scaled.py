"""Modules with FP8 scaling state: what checkpointing, graphs and state dicts must know of them."""

from __future__ import annotations

from torch import nn

from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.autocast import Scope
from transformer_engine.pytorch.extra_state import OptionalExtraState
from transformer_engine.pytorch.scaling_state import ScalingState


class ScaledModule(OptionalExtraState, nn.Module):
    """Base of the modules with GEMMs and of DotProductAttention.

    Args:
        gemms: how many GEMMs the columns of its scaling state are for, see `quantization.py`.
    """

    name: str

    def __init__(self, gemms: int) -> None:
        super().__init__()
        self.gemm_count = gemms
        self.scaling: dict[str, ScalingState] = {}  # by direction; empty before delayed scaling
        self.in_foreign_region = False  # see `repeated`

    def updates(self, scope: Scope) -> bool:
        """Whether a step of this module in this scope ends with an update of scales."""
        return scope.enabled and isinstance(scope.recipe, DelayedScaling)
