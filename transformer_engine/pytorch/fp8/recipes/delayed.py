"""`DelayedScaling`: every cast has a scale and a history of amaxes in the module's state."""

from __future__ import annotations

import torch

from transformer_engine.pytorch.dtypes import FP8_NAMES
from transformer_engine.pytorch.fp8.operands import Demand, FusedArguments, FusedOutputs, Operands
from transformer_engine.pytorch.fp8.quantizers import (
    Fp8Quantizer,
    Quantizer,
    Tensors,
)


class DelayedQuantizer(Fp8Quantizer, native=True):
    """Scale from the history; the amax of this tensor goes into it.

    Args:
        scale: fp32 `[1]`, read by the kernel.
        amax: fp32 `[1]`, raised to `max |x|`; None to leave no trace (evaluation).
        format: value of `DType`.
    """

    scaling = "fp8_delayed_scaling"
    rounds_once = True
    recasts_alike = False

    def __init__(self, scale: torch.Tensor, amax: torch.Tensor | None, format: int) -> None:
        super().__init__(format)
        self.scale = scale
        self.amax = amax

    def operands(self, x: torch.Tensor, demand: Demand) -> Operands:
        """Cast with the stored scale, in one pass."""
        return self.cast_with(x, demand, self.scale, self.amax)

    def fused_arguments(self, request: Demand | None) -> FusedArguments:
        """The whole cast."""
        assert request is not None
        return FusedArguments(
            False,
            self.format,
            self.scale,
            self.amax,
            request.rowwise,
            request.columnwise,
            epsilon=0.0,
            moments=request.moments,
            active=request.active,
        )

    def fused_result(self, request: Demand | None, made: FusedOutputs) -> Operands:
        """The operands."""
        assert made.scales is not None
        return self.pack(made.codes, made.transposed, made.scales, made.bias_grad)

    def repeating(self, scale: torch.Tensor | None) -> Quantizer:
        """The same format with a given scale."""
        assert scale is not None
        return DelayedQuantizer(scale, None, self.format)

    def persistent_tensors(self) -> Tensors:
        """The scale, and the amax where it is raised."""
        return (self.scale,) if self.amax is None else (self.scale, self.amax)

    def exported_scale(self, x: torch.Tensor) -> torch.Tensor:
        """The stored scale."""
        return self.scale.reshape(())

    def __repr__(self) -> str:
        return f"DelayedQuantizer({FP8_NAMES[self.format]})"
