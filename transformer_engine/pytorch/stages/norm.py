"""Norm: LayerNorm or RMSNorm over the last axis, straight into what the next GEMM takes."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.kernels.norm import (
    LAYER_NORM,
    RMS_NORM,
    norm_backward,
    norm_forward,
)
from transformer_engine.pytorch.operands import Demand, Operands
from transformer_engine.pytorch.stages.base import (
    Parameters,
    Run,
    Saved,
    Stage,
    Value,
    fused_arguments,
    fused_result,
)

KINDS = {"LayerNorm": LAYER_NORM, "RMSNorm": RMS_NORM}


class Norm(Stage):
    """Two parameters: gamma `[features]` and beta `[features]` (None for RMSNorm).

    Args:
        kind: `"LayerNorm"` or `"RMSNorm"`.
        epsilon: added to the variance (or mean square).
        zero_centered: use `1 + gamma`.
        tap: also return the plain output (the chain's second result).
    """

    parameter_count = 2

    def __init__(
        self, kind: str, epsilon: float, zero_centered: bool = False, tap: bool = False
    ) -> None:
        self.kind = KINDS[kind]
        self.epsilon = epsilon
        self.zero_centered = zero_centered
        self.tap = tap

    def forward(
        self, x: Value, parameters: Parameters, plan: Run, wants: Demand | None
    ) -> tuple[Value, Saved]:
        """Normalise; the tap is the plain output."""
        assert isinstance(x, torch.Tensor)
        gamma, beta = parameters
        assert gamma is not None
        fused = fused_arguments(wants)
        y, codes, transposed, scales, mean, rstd = norm_forward(
            x,
            gamma,
            beta,
            self.kind,
            self.epsilon,
            self.zero_centered,
            plan.dtype if fused.plain or self.tap else None,
            *fused[1:],
        )
        value = fused_result(wants, y, codes, transposed, scales)
        tensors = (x, gamma, mean, rstd) if plan.recording else ()
        return value, Saved(tensors, None, y if self.tap else None)

    def backward_data(
        self, grad: Value, saved: Saved, plan: Run, wants: Demand | None
    ) -> tuple[Value | None, Any]:
        """All three gradients come from one kernel; those of the parameters are carried."""
        assert not isinstance(grad, Operands)
        x, gamma, mean, rstd = saved.tensors
        assert x is not None and gamma is not None and rstd is not None
        dx, dgamma, dbeta = norm_backward(
            grad, x, gamma, mean, rstd, self.kind, self.zero_centered, None
        )
        return dx, (dgamma, dbeta)

    def backward_params(self, carry: Any, saved: Saved, plan: Run) -> Parameters:
        """The gradients of gamma and beta."""
        return carry
