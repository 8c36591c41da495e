"""Activation: plain or gated, straight into what the next GEMM takes, both ways."""

from __future__ import annotations

from typing import Any

from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.stages.base import (
    Parameters,
    Results,
    Saved,
    Stage,
    Values,
    quantizer_of,
)
from transformer_engine.pytorch.fp8.operands import FusedOutputs, OperandRequest, Operands
from transformer_engine.pytorch.kernels.activation import (
    DEFINITIONS,
    activation_backward,
    activation_forward,
    is_gated,
)


class Activation(Stage):
    """No parameters. `kind` is the number of the activation in `kernels.activation`."""

    label = "activation"
    results = ("activated",)

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def recordable(self, plan: CallPlan) -> bool:
        """Always."""
        return True

    def forward(
        self, inputs: Values, parameters: Parameters, plan: CallPlan, request: OperandRequest | None
    ) -> tuple[Results, Saved]:
        """`act(x)`, or `act(x1) * x2` for gated kinds."""
        (x,) = inputs
        quantizer = quantizer_of(request)
        made = activation_forward(x, self.kind, *quantizer.fused_arguments(request))
        value = quantizer.fused_result(request, FusedOutputs(*made))
        return (value,), Saved((x,) if plan.requires_grad else ())

    def exported(self, inputs: Values, parameters: Parameters, plan: CallPlan) -> Results:
        """In fp32, as it is computed."""
        (x,) = inputs
        function = DEFINITIONS[self.kind // 2]
        if not is_gated(self.kind):
            return (function(x.float()),)
        gate, linear = x.float().chunk(2, dim=-1)
        return (function(gate) * linear,)

    def backward_data(
        self, grads: Values, saved: Saved, plan: CallPlan, request: OperandRequest | None
    ) -> tuple[Results, Any]:
        """The gradient of `x`, quantised and with its column sums where the previous GEMM asks."""
        (grad,) = grads
        assert not isinstance(grad, Operands)
        (x,) = saved.tensors
        assert x is not None
        quantizer = quantizer_of(request)
        fused = quantizer.fused_arguments(request)
        made = activation_backward(
            grad,
            x,
            self.kind,
            *fused[:-2],
            None if request is None else request.bias_grad,
            fused.moments,
            fused.active,
        )
        return (quantizer.fused_result(request, FusedOutputs(*made)),), None
