"""Activation: plain or gated, straight into what the next GEMM takes, both ways."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.chain.stages.base import (
    Parameters,
    Run,
    Saved,
    Stage,
    quantizer_of,
)
from transformer_engine.pytorch.fp8.operands import Demand, FusedOutputs, Operands, Result, Value
from transformer_engine.pytorch.kernels.activation import (
    DEFINITIONS,
    activation_backward,
    activation_forward,
    is_gated,
)


class Activation(Stage):
    """No parameters. `kind` is the number of the activation in `kernels.activation`."""

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def replayable(self, plan: Run) -> bool:
        """Always."""
        return True

    def forward(
        self, x: Value, parameters: Parameters, plan: Run, wants: Demand | None
    ) -> tuple[Result, Saved]:
        """`act(x)`, or `act(x1) * x2` for gated kinds."""
        assert isinstance(x, torch.Tensor)
        quantizer = quantizer_of(wants)
        made = activation_forward(x, self.kind, *quantizer.fused_arguments(wants))
        value = quantizer.fused_result(wants, FusedOutputs(*made))
        return value, Saved((x,) if plan.recording else ())

    def exported(self, x: torch.Tensor, parameters: Parameters, plan: Run) -> torch.Tensor:
        """In fp32, as it is computed."""
        function = DEFINITIONS[self.kind // 2]
        if not is_gated(self.kind):
            return function(x.float())
        gate, linear = x.float().chunk(2, dim=-1)
        return function(gate) * linear

    def backward_data(
        self, grad: Value, saved: Saved, plan: Run, wants: Demand | None
    ) -> tuple[Result | None, Any]:
        """The gradient of `x`, quantised and with its column sums where the previous GEMM asks."""
        assert not isinstance(grad, Operands)
        (x,) = saved.tensors
        assert x is not None
        quantizer = quantizer_of(wants)
        fused = quantizer.fused_arguments(wants)
        made = activation_backward(
            grad,
            x,
            self.kind,
            *fused[:-2],
            None if wants is None else wants.bias_grad,
            fused.moments,
            fused.active,
        )
        return quantizer.fused_result(wants, FusedOutputs(*made)), None
