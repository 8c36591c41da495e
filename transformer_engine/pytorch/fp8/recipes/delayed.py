"""`DelayedScaling`: every cast has a scale and a history of amaxes in the module's state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.dtypes import FP8_NAMES
from transformer_engine.pytorch.fp8.operands import Demand, FusedArguments, FusedOutputs, Operands
from transformer_engine.pytorch.fp8.quantizers import (
    Fp8Quantizer,
    GemmQuantizers,
    Quantizer,
    Tensors,
)
from transformer_engine.pytorch.fp8.recipes.base import GemmColumns, RecipeRules, register
from transformer_engine.pytorch.kernels.delayed_scaling import delayed_scaling_update
from transformer_engine.pytorch.scale_layout import WHOLE, ScaleLayout

if TYPE_CHECKING:
    from transformer_engine.pytorch.fp8.scaling_state import ScalingMembers, ScalingState


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


@register(DelayedScaling)
class DelayedRules(RecipeRules):
    """The answers of `DelayedScaling`."""

    keeps_state = True
    scaling = DelayedQuantizer.scaling
    fp8_attention = True
    exportable = True
    weight_family = "delayed"

    def gemm_quantizers(
        self, recipe: DelayedScaling, columns: GemmColumns | None
    ) -> GemmQuantizers:
        """Casts with the scales of the state; those of gradients where these have columns."""
        assert columns is not None
        forward, grad_output = self.forward_format(recipe), None
        if columns.grad_output is not None:
            grad_output = DelayedQuantizer(*columns.grad_output, self.backward_format(recipe))
        return GemmQuantizers(
            DelayedQuantizer(*columns.input, forward),
            DelayedQuantizer(*columns.weight, forward),
            grad_output,
        )

    def update_scales(
        self, members: ScalingMembers, states: list[ScalingState], amaxes: torch.Tensor | None
    ) -> None:
        """One launch for all states, or state by state with the recipe's own functions."""
        recipe: DelayedScaling = members.recipe
        algorithm = recipe.amax_compute_algo
        if callable(algorithm) or recipe.scaling_factor_compute_algo is not None:
            _update_with_callables(states, recipe, members.fp8_max, amaxes)
        else:
            table = members.table(states)
            delayed_scaling_update(table, amaxes, algorithm, members.fp8_max, recipe.margin)

    def weight_layout(self, recipe: DelayedScaling) -> ScaleLayout:
        """One scale."""
        return WHOLE

    def weight_settings(self, recipe: DelayedScaling) -> dict[str, Any]:
        """The margin; the scale is that of the values in hand, see `WeightQuantizer`."""
        return {"family": self.weight_family, "margin": recipe.margin}


def _update_with_callables(
    states: list[ScalingState],
    recipe: DelayedScaling,
    fp8_max: float,
    reduced: torch.Tensor | None,
) -> None:
    """The same update with the recipe's own functions, state by state, in torch."""
    start = 0
    for state in states:
        history, count = state.amax_history, state.scale.numel()
        if reduced is not None:
            history[0] = reduced[start : start + count]
        start += count
        algorithm = recipe.amax_compute_algo
        if callable(algorithm):
            amax = algorithm(history)
        else:
            amax = history.amax(dim=0) if algorithm == "max" else history[0]
        if recipe.scaling_factor_compute_algo is not None:
            scale = recipe.scaling_factor_compute_algo(amax, state.scale, fp8_max, recipe)
        else:
            scale = (fp8_max / amax) / 2.0**recipe.margin
            scale = torch.where((amax > 0) & amax.isfinite(), scale, state.scale)
            scale = scale.clamp(max=torch.finfo(torch.float32).max)
        state.scale.copy_(scale)
        history.copy_(history.roll(-1, 0))
        history[0].zero_()
