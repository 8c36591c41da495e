"""DropoutAdd: `residual + dropout(x + bias)`, the end of every block of a transformer layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.stage import Parameters, Results, Saved, Stage, Values
from transformer_engine.pytorch.fp8.casts.operands import OperandRequest
from transformer_engine.pytorch.kernels.dropout_add import (
    dropout_add_backward,
    dropout_add_forward,
)


class _Plan(NamedTuple):
    p: float
    compiling: bool
    requires_grad: bool
    needs_x: bool
    needs_residual: bool
    needs_bias: bool


class _Facts(NamedTuple):
    dtype: torch.dtype
    bias_dtype: torch.dtype | None
    has_residual: bool


class DropoutAdd(Stage):
    """Computes in fp32 and rounds once, to the dtype of the residual (of `x` if there is none).

    It reads `x` `[..., cols]` and the residual of the same shape, or None. The parameters are a
    bias `[cols]` or None, and the seed. `options` of the call is the probability of dropping an
    element, `0 <= p < 1`.
    """

    label = "dropout_add"
    results = ("hidden_states",)
    parameter_count = 2
    draws = True

    def prepare(self, call: CallPlan, first: int) -> _Plan:
        """Which gradients are wanted."""
        values = call.chain.inputs
        needs = (call.needs[0], values > 1 and call.needs[1], call.needs[first])
        return _Plan(call.options, call.compiling, call.requires_grad, *needs)

    def described(self, plan: _Plan) -> str:
        """See the base class."""
        return f"{self.label}(p={plan.p})"

    def describe_options(self, options: float) -> tuple[float] | None:
        """Probability 0; None with dropout, which draws random numbers."""
        return (0.0,) if options == 0.0 else None  # a literal: `options` may be a symbol of Dynamo

    def recordable(self, plan: _Plan) -> bool:
        """Always: the seed is drawn before."""
        return True

    def draw(self, plan: _Plan, device: torch.device) -> torch.Tensor | None:
        """A seed on the device, from torch's generator: captured graphs draw one at each replay."""
        return torch.randint(2**63 - 1, (1,), device=device) if plan.p > 0.0 else None

    def forward(
        self, inputs: Values, parameters: Parameters, plan: _Plan, request: OperandRequest | None
    ) -> tuple[Results, Saved]:
        """`residual + dropout(x + bias)`."""
        x, residual = inputs if len(inputs) > 1 else (inputs[0], None)
        bias, seed = parameters
        facts = _Facts(x.dtype, None if bias is None else bias.dtype, len(inputs) > 1)
        saved = Saved((seed,), facts) if plan.requires_grad else Saved(())
        if plan.compiling and seed is None and bias is None and residual is not None:
            return (residual + x.to(residual.dtype),), saved  # compilers fuse this
        if bias is not None:
            bias = bias.to(x.dtype)
        return (dropout_add_forward(x, bias, residual, seed, plan.p),), saved

    def exported(self, inputs: Values, parameters: Parameters, plan: _Plan) -> Results:
        """The sum without dropout, which an export refuses earlier."""
        x, residual = inputs if len(inputs) > 1 else (inputs[0], None)
        bias = parameters[0]
        total = x.float() if bias is None else x.float() + bias.float()
        if residual is None:
            return (total.to(x.dtype),)
        return ((residual + total).to(residual.dtype),)

    def backward_data(
        self, grads: Values, saved: Saved, plan: _Plan, request: OperandRequest | None
    ) -> tuple[Results, Any]:
        """The gradients of `x` and the residual; the same kernel computes that of the bias."""
        (grad,) = grads
        (seed,) = saved.tensors
        dtype, bias_dtype, _ = saved.facts
        same = seed is None and dtype is grad.dtype
        x_grad, bias_grad = dropout_add_backward(
            grad,
            seed,
            plan.p,
            dtype if plan.needs_x and not same else None,
            bias_dtype if plan.needs_bias else None,
        )
        if same and plan.needs_x:
            x_grad = grad
        residual_grad = (grad if plan.needs_residual else None,)
        return (x_grad, *(residual_grad if saved.facts.has_residual else ())), bias_grad

    def backward_params(self, carry: Any, saved: Saved, plan: _Plan) -> Parameters:
        """The gradient of the bias; the seed has none."""
        return carry, None
