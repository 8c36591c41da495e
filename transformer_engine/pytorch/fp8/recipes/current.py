"""`Float8CurrentScaling`: every tensor has a scale from its own largest magnitude."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from transformer_engine.common.recipe import Float8CurrentScaling, QParams
from transformer_engine.pytorch.dtypes import TORCH_FP8
from transformer_engine.pytorch.fp8.casts.batches import cast_together
from transformer_engine.pytorch.fp8.casts.operands import FusedArguments, OperandRequest, Operands
from transformer_engine.pytorch.fp8.casts.quantizers import Fp8Quantizer, GemmQuantizers
from transformer_engine.pytorch.fp8.recipes.base import GemmColumns, RecipeRules, register
from transformer_engine.pytorch.kernels.amax import amax, current_scales, current_scales_many
from transformer_engine.pytorch.parallel.collectives import all_reduce
from transformer_engine.pytorch.scale_layout import WHOLE, ScaleLayout


class CurrentQuantizer(Fp8Quantizer, native=True):
    """Scale from the tensor itself: `fp8_max / max |x|`; for the arguments see `current_scales`."""

    scaling = "fp8_current_scaling"
    casts_columns_later = True
    casts_many = True

    def __init__(self, format: int, power_of_2: bool = False, epsilon: float = 0.0) -> None:
        super().__init__(format)
        self.power_of_2 = power_of_2
        self.epsilon = epsilon

    def constants(self) -> tuple[Any, ...] | None:
        """The arguments; None if epsilon is not its default."""
        return (self.format, self.power_of_2) if self.epsilon == 0.0 else None

    @property
    def cache_key(self) -> Hashable:
        """Equal for equal formats and scales."""
        return self.scaling, self.format, self.power_of_2, self.epsilon

    def module_settings(self) -> tuple[Any, ...]:
        """The arguments; empty for subclasses."""
        if type(self) not in (CurrentQuantizer, self.public_class):
            return ()
        return self.scaling, self.format, bool(self.power_of_2), repr(float(self.epsilon))

    def operands(self, x: torch.Tensor, request: OperandRequest) -> Operands:
        """Find the scale, then cast."""
        return self.cast(x, current_scales(x, self.format, self.power_of_2, self.epsilon), request)

    def cast(
        self, x: torch.Tensor, scales: torch.Tensor | None, request: OperandRequest
    ) -> Operands:
        """Cast with the scales that the producer of `x` has found; find them if it has not."""
        if scales is None:
            return self.operands(x, request)
        return self.cast_with(x, request, scales=scales)

    @classmethod
    def cast_many(
        cls, tensors: list[torch.Tensor], requests: Sequence[OperandRequest]
    ) -> list[Operands]:
        """Find all scales, then cast."""
        one: Any = requests[0].quantizer
        scales = current_scales_many(tensors, one.format, one.power_of_2, one.epsilon)
        return cast_together(tensors, requests, scales, [], [])

    def fused_arguments(self, request: OperandRequest | None) -> FusedArguments:
        """The fused kernel finds the scale; the cast after it merges the moments."""
        return FusedArguments(
            True, self.format, current=True, power_of_2=self.power_of_2, epsilon=self.epsilon
        )

    def of_shards(self, group: Any) -> ShardQuantizer:
        """A quantizer that first reduces the amax over the ranks."""
        return ShardQuantizer(self, group)

    def exported_scale(self, x: torch.Tensor) -> torch.Tensor:
        """As `current_scale` of csrc/core/scaling.h, but a NaN in `x` makes the scale 1."""
        amax = x.abs().max().clamp(min=self.epsilon)
        known = (amax > 0.0) & (amax < torch.inf)
        scale = torch.finfo(TORCH_FP8[self.format]).max / torch.where(known, amax, 1.0)
        scale = scale.clamp(max=torch.finfo(torch.float32).max)
        if self.power_of_2:
            power = torch.exp2(torch.round(torch.log2(scale)))
            scale = torch.where(power > scale, power / 2, power)
        return torch.where(known, scale, 1.0)


class ShardQuantizer(CurrentQuantizer):
    """`CurrentQuantizer` for a rank's rows of a tensor: the scale is that of all ranks' rows.

    `one` is the quantizer of the whole tensor.
    """

    casts_many = False  # each cast has a collective

    def __init__(self, one: CurrentQuantizer, group: Any) -> None:
        super().__init__(one.format, one.power_of_2, one.epsilon)
        self.group = group

    def operands(self, x: torch.Tensor, request: OperandRequest) -> Operands:
        """Find the scale of all rows, then cast."""
        largest = all_reduce(amax(x), self.group, "max").wait()
        scales = current_scales(largest, self.format, self.power_of_2, self.epsilon)
        return self.cast_with(x, request, scales=scales)

    def fused_arguments(self, request: OperandRequest | None) -> FusedArguments:
        """The fused kernel only makes the plain tensor: the scale depends on all ranks."""
        return FusedArguments(True, epsilon=0.0)


@register(Float8CurrentScaling)
class CurrentRules(RecipeRules):
    """The rules of `Float8CurrentScaling`."""

    scaling = CurrentQuantizer.scaling
    exportable = True
    weight_family = "current"

    def gemm_quantizers(
        self, recipe: Float8CurrentScaling, columns: GemmColumns | None
    ) -> GemmQuantizers:
        """Casts as the recipe says for each kind of tensor."""

        def quantizer(parameters: QParams, format: int) -> CurrentQuantizer:
            power_of_2 = recipe.use_power_2_scales or parameters.power_2_scale
            return CurrentQuantizer(format, power_of_2, parameters.epsilon())

        gemms = GemmQuantizers(
            input=quantizer(recipe.fp8_quant_fwd_inp, self.forward_format(recipe)),
            weight=quantizer(recipe.fp8_quant_fwd_weight, self.forward_format(recipe)),
            grad_output=quantizer(recipe.fp8_quant_bwd_grad, self.backward_format(recipe)),
            backward_override=recipe.backward_override,
        )
        gemms.fast_accumulation = (
            not recipe.fp8_gemm_fprop.use_split_accumulator,
            not recipe.fp8_gemm_dgrad.use_split_accumulator,
            not recipe.fp8_gemm_wgrad.use_split_accumulator,
        )
        return gemms

    def weight_layout(self, recipe: Float8CurrentScaling) -> ScaleLayout:
        """One scale for the whole weight."""
        return WHOLE

    def weight_settings(self, recipe: Float8CurrentScaling) -> dict[str, Any]:
        """The settings with which weights are cast."""
        weight: Any = self.gemm_quantizers(recipe, None).weight
        scale = {"power_of_2": weight.power_of_2, "epsilon": weight.epsilon}
        return {"family": self.weight_family, **scale}

    def what_if_quantizer(self, tensor: str, format: int) -> CurrentQuantizer:
        """The cast of the default recipe, in the format of the recipe in use."""
        return CurrentQuantizer(format)
