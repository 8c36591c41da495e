"""Norm: LayerNorm or RMSNorm over the last axis, whose kernel writes operands of the next GEMM."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch.nn.functional import layer_norm

from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.stage import (
    Parameters,
    Recomputes,
    Results,
    Saved,
    Stage,
    Values,
    quantizer_of,
)
from transformer_engine.pytorch.fp8.casts.operands import (
    FusedArguments,
    FusedOutputs,
    OperandRequest,
    Operands,
)
from transformer_engine.pytorch.kernels.norm import (
    LAYER_NORM,
    RMS_NORM,
    norm_backward,
    norm_forward,
)

Tap = Literal["output", "input"] | None


def tap_of(return_layernorm_output: bool, return_input: bool) -> Tap:
    """The tap for these arguments of modules; the output has precedence."""
    if return_layernorm_output:
        return "output"
    return "input" if return_input else None


KINDS = {"LayerNorm": LAYER_NORM, "RMSNorm": RMS_NORM}


class _Plan(NamedTuple):
    dtype: torch.dtype
    requires_grad: bool
    epsilon: float


class Norm(Stage):
    """Its parameters are gamma `[features]` and beta `[features]` (None for RMSNorm).

    Args:
        kind: `"LayerNorm"` or `"RMSNorm"`.
        epsilon: added to the variance (or mean square).
        zero_centered: use `1 + gamma`.
        tap: a second result of the chain: the plain "output" of the norm, or its "input". The
            backward kernel adds the gradient of the latter to the gradient of the input.
    """

    label = "norm"
    parameter_count = 2

    def __init__(
        self, kind: str, epsilon: float, zero_centered: bool = False, tap: Tap = None
    ) -> None:
        self.kind = KINDS[kind]
        self.epsilon = epsilon
        # Under dynamic shapes torch.compile turns floats into inputs of a graph, but not strings.
        self._constant_epsilon = repr(float(epsilon))
        self.zero_centered = zero_centered
        self.tap = tap
        self.results = ("normalized",) if tap is None else ("normalized", "residual")

    def prepare(self, call: CallPlan, first: int) -> _Plan:
        """The numbers of a call; torch.compile must read them before autograd is entered."""
        epsilon = float(self._constant_epsilon) if call.compiling else self.epsilon
        return _Plan(call.dtype, call.requires_grad, epsilon)

    def recordable(self, plan: _Plan) -> bool:
        """Always."""
        return True

    def recomputes(self) -> Recomputes:
        """Values, by the kernel of the forward; nothing if the chain also returns the result."""
        return "nothing" if self.tap == "output" else "values"

    def forward(
        self, inputs: Values, parameters: Parameters, plan: _Plan, request: OperandRequest | None
    ) -> tuple[Results, Saved]:
        """Normalise."""
        (x,) = inputs
        gamma, beta = parameters
        assert gamma is not None
        quantizer = quantizer_of(request)
        fused = quantizer.fused_arguments(request)
        separate = None
        # Statistics are those of the result in the dtype of activations, not of `x`.
        plain = fused.plain or (fused.moments is not None and plan.dtype is not x.dtype)
        if self.tap != "output" and plain and fused.rowwise and not fused.columnwise:
            # The kernel that writes nothing but row-wise FP8 sums in another order than the others.
            # So that inspection does not change the codes, that kernel runs while the debugger
            # inspects, too; a second call makes the plain tensor and its moments.
            separate = FusedArguments(True, epsilon=0.0, moments=fused.moments, active=fused.active)
            fused = fused._replace(moments=None, active=None)
            plain = False
        dtype = plan.dtype if plain or self.tap == "output" else None
        y, codes, transposed, scales, mean, rstd = self._call(x, gamma, beta, plan, dtype, fused)
        if separate is not None:
            y = self._call(x, gamma, beta, plan, plan.dtype, separate)[0]
        value = quantizer.fused_result(request, FusedOutputs(y, codes, transposed, scales))
        saved = Saved((x, gamma, beta, mean, rstd) if plan.requires_grad else ())
        if self.tap is None:  # then nothing keeps the plain result alive after the cast
            return (value,), saved
        return (value, x if self.tap == "input" else y), saved

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

    def exported(self, inputs: Values, parameters: Parameters, plan: _Plan) -> Results:
        """The norm in fp32, as the kernel computes it."""
        (x,) = inputs
        gamma, beta = parameters
        assert gamma is not None
        factor = gamma.float() + 1.0 if self.zero_centered else gamma.float()
        if self.kind == RMS_NORM:
            x_float = x.float()  # torch's rms_norm has no ONNX form on a GPU
            y = x_float * (x_float.square().mean(-1, keepdim=True) + plan.epsilon).rsqrt() * factor
        else:
            offset = None if beta is None else beta.float()
            y = layer_norm(x.float(), factor.shape, factor, offset, plan.epsilon)
        if self.tap is None:
            return (y,)
        return y, x if self.tap == "input" else y.to(plan.dtype)

    def backward_data(
        self, grads: Values, saved: Saved, plan: _Plan, request: OperandRequest | None
    ) -> tuple[Results, Any]:
        """The gradient of `x`. The same kernel computes those of gamma and beta, the `carry`."""
        grad, tap_grad = grads if self.tap is not None else (grads[0], None)
        assert not isinstance(grad, Operands)
        residual_grad = None
        if tap_grad is not None:
            if self.tap == "output":
                grad = tap_grad if grad is None else grad + tap_grad
            elif grad is None:
                return (tap_grad,), (None, None)
            else:
                residual_grad = tap_grad.contiguous()
        x, gamma, beta, mean, rstd = saved.tensors
        assert x is not None and gamma is not None and rstd is not None
        dx, dgamma, dbeta = norm_backward(
            grad, x, gamma, mean, rstd, self.kind, self.zero_centered, residual_grad
        )
        carry: Any = (dgamma, dbeta)
        if saved.result_request is not None:
            plain = quantizer_of(None).fused_arguments(None)
            carry = self._call(x, gamma, beta, plan, plan.dtype, plain)[0], carry
        return (dx,), carry

    def backward_params(self, carry: Any, saved: Saved, plan: _Plan) -> Parameters:
        """The gradients of gamma and beta."""
        return carry
