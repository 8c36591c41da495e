"""Plain and gated activations, whose kernels write operands of GEMMs, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.stage import (
    Parameters,
    Recomputes,
    ResultRequest,
    Results,
    Saved,
    Stage,
    Values,
    quantizer_of,
)
from transformer_engine.pytorch.chain.stages.sides import restore
from transformer_engine.pytorch.dtypes import E4M3
from transformer_engine.pytorch.fp8.casts.operands import FusedOutputs, OperandRequest, Operands
from transformer_engine.pytorch.kernels.activation import (
    DEFAULT_PARAMETERS,
    ActivationParameters,
    activation_backward,
    activation_forward,
    define_activation,
)
from transformer_engine.pytorch.kernels.shapes import rows_of

_PLAIN = ResultRequest(None, E4M3, False)


class Activation(Stage):
    """An activation, without learned parameters; see `kernels.activation` for its arguments."""

    label = "activation"
    results = ("activated",)

    def __init__(self, kind: int, numbers: ActivationParameters = DEFAULT_PARAMETERS) -> None:
        self.kind, self.numbers = kind, numbers

    def recordable(self, plan: CallPlan) -> bool:
        """Always."""
        return True

    def recomputes(self) -> Recomputes:
        """The kernel of the backward can write the plain result or its codes."""
        return "operands"

    def forward(
        self, inputs: Values, parameters: Parameters, plan: CallPlan, request: OperandRequest | None
    ) -> tuple[Results, Saved]:
        """`act(x)`, or `act(x1) * h(x2)` for gated kinds."""
        (x,) = inputs
        quantizer = quantizer_of(request)
        fused = quantizer.fused_arguments(request)
        made = activation_forward(x, self.kind, *fused, *self.numbers)
        value = quantizer.fused_result(request, FusedOutputs(*made))
        return (value,), Saved((x,) if plan.requires_grad else ())

    def exported(self, inputs: Values, parameters: Parameters, plan: CallPlan) -> Results:
        """The activation in fp32, as the kernel computes it."""
        (x,) = inputs
        return (define_activation(self.kind, self.numbers, x.float()),)

    def backward_data(
        self, grads: Values, saved: Saved, plan: CallPlan, request: OperandRequest | None
    ) -> tuple[Results, Any]:
        """The gradient of `x`; quantised and with its column sums if the previous GEMM requests it.

        With `saved.result_request` also the result of the forward, as a side of operands.
        """
        (grad,) = grads
        assert not isinstance(grad, Operands)
        (x,) = saved.tensors
        assert x is not None
        quantizer = quantizer_of(request)
        fused = quantizer.fused_arguments(request)
        again, form = _room_for(grad, saved.result_request, plan), saved.result_request or _PLAIN
        made = activation_backward(
            grad,
            x,
            self.kind,
            *fused[:-2],
            None if request is None else request.bias_grad,
            fused.moments,
            fused.active,
            *self.numbers,
            again,
            *form,
        )
        carry = None if again is None else (restore(again, *form[:2]), None)
        return (quantizer.fused_result(request, FusedOutputs(*made)),), carry


def _room_for(
    grad: torch.Tensor, request: ResultRequest | None, plan: CallPlan
) -> torch.Tensor | None:
    """Memory for the forward's result. A plain result overwrites its gradient, if not compiled."""
    if request is None:
        return None
    if request.scales is not None:
        return grad.new_empty((grad.shape[-1], rows_of(grad)), dtype=torch.uint8)
    return torch.empty_like(grad) if plan.compiling else grad
