"""Stages are what modules are made of: forward, data gradient, parameter gradients.

A stage reads values, and tensors that belong to the call (parameters, masks, angles), and makes
values. It holds no tensors of its own: what its backward needs goes out as `Saved`. Fusion is
negotiation: a stage is told what the next one requests (walking back: what the previous one
requests of its gradient), and may return `Operands` instead of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.fp8.operands import Demand, Operands
from transformer_engine.pytorch.fp8.quantizers import (
    IDENTITY,
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    Quantizer,
    WrappingQuantizer,
)

Parameters: TypeAlias = Sequence[torch.Tensor | None]


class PendingCast(NamedTuple):
    """A result whose current scales are known, or whose blocks will have their own.

    The chain casts it once the stage has returned and nothing holds what the stage read: that and
    the codes together would set the peak of memory.
    """

    plain: torch.Tensor
    scales: torch.Tensor | None
    request: Demand
    bias_grad: torch.Tensor | None

    def cast(self) -> Operands:
        """The operands; the column sums have been taken already."""
        request = self.request
        quantizer: CurrentQuantizer | BlockQuantizer = request.quantizer  # type: ignore[assignment]
        sides = Demand(
            quantizer, request.rowwise, request.columnwise, None, request.moments, request.active
        )
        if self.scales is None:
            operands = quantizer.operands(self.plain, sides)
        else:
            assert isinstance(quantizer, CurrentQuantizer)
            operands = quantizer.cast(self.plain, self.scales, sides)
        operands.bias_grad = self.bias_grad
        return operands


Value: TypeAlias = torch.Tensor | Operands  # what a stage reads
Result: TypeAlias = Value | PendingCast  # what it makes
Values: TypeAlias = Sequence[Any]  # of a stage, in order; None is a gradient that nobody has
Results: TypeAlias = tuple[Any, ...]


class Saved(NamedTuple):
    """What a stage leaves for its backward: tensors for autograd to save, and plain facts.

    `target` says where a weight gradient goes; it belongs to the call.
    """

    tensors: tuple[torch.Tensor | None, ...]
    facts: Any = None
    target: Any = None


class Stage:
    """Base of all stages.

    `prepare` makes a plan: whatever the stage can decide once for all calls that share a
    `CallPlan`. Methods get that of their stage back.

    Attributes:
        label: what the printed data flow calls it.
        results: names of the values that it makes.
        parameter_count: how many tensors it reads beside values.
        draws: the last of those is a seed: None where the stage shall draw it itself.
    """

    label = "stage"
    results: tuple[str, ...] = ("result",)
    parameter_count = 0
    draws = False

    def rename(self, layer: str) -> None:
        """The module that this stage is part of has another name now."""

    def prepare(self, call: CallPlan, first: int) -> Any:
        """The plan; the call's where there is nothing to decide.

        Args:
            call: of the chain.
            first: index of the stage's first parameter among the inputs of the call.
        """
        return call

    def recordable(self, plan: Any) -> bool:
        """Whether calls do nothing but allocate and call `_C`, the same for equal shapes."""
        return False

    def persistent_tensors(self, plan: Any) -> list[torch.Tensor]:
        """What such calls read or write beside values and parameters."""
        return []

    def caches(self, plan: Any) -> bool:
        """Whether calls read tensors that earlier ones have cached."""
        return False

    def cached(self, plan: Any) -> tuple[torch.Tensor | None, ...] | None:
        """Those tensors; None where they are yet to be made."""
        return None

    def detach_cache(self) -> None:
        """Take those tensors out of autograd's graph, which compiled code makes them part of."""

    def draw(self, plan: Any, device: torch.device) -> torch.Tensor | None:
        """A new seed; None where the plan has no use for one."""
        return None

    def accumulates(self, plan: Any) -> bool:
        """Whether `wgrad_target` may say something."""
        return False

    def wgrad_target(self, plan: Any, parameters: Parameters) -> Any:
        """Where the weight gradient of this call goes; None for a fresh tensor."""
        return None

    def request(self, plan: Any, x: torch.Tensor) -> Demand | None:
        """What this stage wants its input to become; `x` is a tensor with as many tokens."""
        return None

    def grad_request(self, plan: Any, grad: torch.Tensor) -> Demand | None:
        """What this stage wants the gradient of its result to become."""
        return None

    def forward(
        self, inputs: Values, parameters: Parameters, plan: Any, request: Demand | None
    ) -> tuple[Results, Saved]:
        """The results, and what backward needs.

        Args:
            inputs: the values that it reads.
            parameters: tensors of the call.
            plan: what `prepare` has returned.
            request: of the stage that reads the first result, if that is the only one.
        """
        raise NotImplementedError

    def exported(self, inputs: Values, parameters: Parameters, plan: Any) -> Results:
        """The forward in torch's operators and those of `export`, for a graph of ONNX.

        Values may be in fp32 where they would only be rounded before a cast to FP8.
        """
        raise NotImplementedError

    def backward_data(
        self, grads: Values, saved: Saved, plan: Any, request: Demand | None
    ) -> tuple[Results, Any]:
        """The gradients of the values that it read, and what `backward_params` carries on with.

        Args:
            grads: of its results; None where nobody has one, but not of all of them.
            saved: what forward returned.
            plan: what `prepare` has returned.
            request: of the stage that made the first input, if nobody else reads that.
        """
        raise NotImplementedError

    def backward_params(self, carry: Any, saved: Saved, plan: Any) -> Parameters:
        """The gradients of the parameters."""
        return ()


def quantizer_of(wants: Demand | None) -> Quantizer:
    """The quantizer of a demand; the identity where nothing is demanded."""
    return IDENTITY if wants is None else wants.quantizer  # type: ignore[return-value]


class FusedArguments(NamedTuple):
    """A demand in the words of the fused kernels: see `kernels.norm` and `kernels.activation`."""

    plain: bool  # a plain result is needed
    format: int = -1
    scale: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    rowwise: bool = False
    columnwise: bool = False
    current: bool = False
    power_of_2: bool = False
    epsilon: float = 0.0
    moments: torch.Tensor | None = None
    active: torch.Tensor | None = None


def fused_arguments(wants: Demand | None) -> FusedArguments:
    """How a producing kernel serves a demand in its own pass.

    Epsilons are literals here: torch.compile makes an input of a default that is a float.
    """
    quantizer, plain = quantizer_of(wants), False
    while isinstance(quantizer, WrappingQuantizer):
        assert wants is not None
        plain = plain or quantizer.needs_plain
        wants = quantizer.inner_demand(wants)
        quantizer = quantizer_of(wants)
    if isinstance(quantizer, DelayedQuantizer):
        assert wants is not None
        return FusedArguments(
            plain,
            quantizer.format,
            quantizer.scale,
            quantizer.amax,
            wants.rowwise,
            wants.columnwise,
            epsilon=0.0,
            moments=wants.moments,
            active=wants.active,
        )
    if isinstance(quantizer, CurrentQuantizer):  # moments are taken by the cast
        return FusedArguments(
            True,
            quantizer.format,
            current=True,
            power_of_2=quantizer.power_of_2,
            epsilon=quantizer.epsilon,
        )
    if wants is None or isinstance(quantizer, BlockQuantizer):
        return FusedArguments(True, epsilon=0.0)
    return FusedArguments(True, epsilon=0.0, moments=wants.moments, active=wants.active)


def fused_result(
    wants: Demand | None,
    plain: torch.Tensor | None,
    codes: torch.Tensor | None,
    transposed: torch.Tensor | None,
    scales: torch.Tensor | None,
    bias_grad: torch.Tensor | None = None,
) -> Result:
    """What a fused kernel returned, as the result of its stage."""
    quantizer = quantizer_of(wants)
    if isinstance(quantizer, WrappingQuantizer):
        assert wants is not None
        inner = quantizer.inner_demand(wants)
        cast = fused_result(inner, plain, codes, transposed, scales, bias_grad)
        return quantizer.finish(
            plain, cast.cast() if isinstance(cast, PendingCast) else cast, wants
        )
    if isinstance(quantizer, DelayedQuantizer):
        assert scales is not None
        return quantizer.pack(codes, transposed, scales, bias_grad)
    assert plain is not None
    if isinstance(quantizer, CurrentQuantizer | BlockQuantizer):
        assert wants is not None
        return PendingCast(plain, scales, wants, bias_grad)
    return plain if bias_grad is None else Operands(plain, plain, bias_grad)
