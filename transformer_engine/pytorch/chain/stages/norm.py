"""Norm: LayerNorm or RMSNorm over the last axis, straight into what the next GEMM takes."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch.nn.functional import layer_norm, rms_norm

from transformer_engine.pytorch.chain.stages.base import (
    Parameters,
    Run,
    Saved,
    Stage,
    quantizer_of,
)
from transformer_engine.pytorch.fp8.operands import (
    Demand,
    FusedArguments,
    FusedOutputs,
    Operands,
    Result,
    Value,
)
from transformer_engine.pytorch.kernels.norm import (
    LAYER_NORM,
    RMS_NORM,
    norm_backward,
    norm_forward,
)

Tap = Literal["output", "input"] | None


def tap_of(return_layernorm_output: bool, return_input: bool) -> Tap:
    """The tap for these arguments of modules; the output goes first."""
    if return_layernorm_output:
        return "output"
    return "input" if return_input else None


KINDS = {"LayerNorm": LAYER_NORM, "RMSNorm": RMS_NORM}


class _Plan(NamedTuple):
    dtype: torch.dtype
    recording: bool
    epsilon: float


class Norm(Stage):
    """Two parameters: gamma `[features]` and beta `[features]` (None for RMSNorm).

    Args:
        kind: `"LayerNorm"` or `"RMSNorm"`.
        epsilon: added to the variance (or mean square).
        zero_centered: use `1 + gamma`.
        tap: a second result of the chain: the plain "output" of the norm, or its "input". What
            comes back on the latter is added by the kernel that makes the input's gradient.
    """

    parameter_count = 2

    def __init__(
        self, kind: str, epsilon: float, zero_centered: bool = False, tap: Tap = None
    ) -> None:
        self.kind = KINDS[kind]
        self.epsilon = epsilon
        # Floats are inputs of graphs under dynamic shapes; this one is a constant of all of them.
        self._constant_epsilon = repr(epsilon)
        self.zero_centered = zero_centered
        self.tap = tap

    def prepare(self, run: Run) -> _Plan:
        """What a call reads; torch.compile wants numbers to be read before autograd is entered."""
        epsilon = float(self._constant_epsilon) if run.compiling else self.epsilon
        return _Plan(run.dtype, run.recording, epsilon)

    def replayable(self, plan: _Plan) -> bool:
        """Always."""
        return True

    def forward(
        self, x: Value, parameters: Parameters, plan: _Plan, wants: Demand | None
    ) -> tuple[Result, Saved]:
        """Normalise."""
        assert isinstance(x, torch.Tensor)
        gamma, beta = parameters
        assert gamma is not None
        quantizer = quantizer_of(wants)
        fused = quantizer.fused_arguments(wants)
        apart = None
        if self.tap != "output" and fused.plain and fused.rowwise and not fused.columnwise:
            # A kernel of its own makes row-wise FP8 alone, and sums in its own order: it stays in
            # place for whoever only looks.
            apart = FusedArguments(True, epsilon=0.0, moments=fused.moments, active=fused.active)
            fused = fused._replace(plain=False, moments=None, active=None)
        plain = plan.dtype if fused.plain or self.tap == "output" else None
        y, codes, transposed, scales, mean, rstd = self._call(x, gamma, beta, plan, plain, fused)
        if apart is not None:
            y = self._call(x, gamma, beta, plan, plan.dtype, apart)[0]
        value = quantizer.fused_result(wants, FusedOutputs(y, codes, transposed, scales))
        tensors = (x, gamma, mean, rstd) if plan.recording else ()
        # Without a tap nothing holds the plain result once it is cast.
        tap = None if self.tap is None else x if self.tap == "input" else y
        return value, Saved(tensors, None, tap)

    def _call(
        self,
        x: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        plan: _Plan,
        dtype: torch.dtype | None,
        fused: FusedArguments,
    ) -> tuple[torch.Tensor | None, ...]:
        return norm_forward(
            x, gamma, beta, self.kind, plan.epsilon, self.zero_centered, dtype, *fused[1:]
        )

    def exported(self, x: torch.Tensor, parameters: Parameters, plan: _Plan) -> torch.Tensor:
        """In fp32, as it is computed."""
        gamma, beta = parameters
        assert gamma is not None
        factor = gamma.float() + 1.0 if self.zero_centered else gamma.float()
        if self.kind == RMS_NORM:
            return rms_norm(x.float(), factor.shape, factor, plan.epsilon)
        offset = None if beta is None else beta.float()
        return layer_norm(x.float(), factor.shape, factor, offset, plan.epsilon)

    def backward_data(
        self, grad: Value | None, saved: Saved, plan: _Plan, wants: Demand | None
    ) -> tuple[Result | None, Any]:
        """All three gradients come from one kernel; those of the parameters are carried."""
        assert not isinstance(grad, Operands)
        residual_grad = None
        if saved.tap is not None:
            if self.tap == "output":
                grad = saved.tap if grad is None else grad + saved.tap
            elif grad is None:
                return saved.tap, (None, None)
            else:
                residual_grad = saved.tap.contiguous()
        assert grad is not None
        x, gamma, mean, rstd = saved.tensors
        assert x is not None and gamma is not None and rstd is not None
        dx, dgamma, dbeta = norm_backward(
            grad, x, gamma, mean, rstd, self.kind, self.zero_centered, residual_grad
        )
        return dx, (dgamma, dbeta)

    def backward_params(self, carry: Any, saved: Saved, plan: _Plan) -> Parameters:
        """The gradients of gamma and beta."""
        return carry
