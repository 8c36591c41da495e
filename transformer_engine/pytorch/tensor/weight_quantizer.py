"""`WeightQuantizer`: how a weight that is kept in FP8 is written."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from transformer_engine.pytorch.dtypes import E4M3
from transformer_engine.pytorch.kernels.amax import current_scales
from transformer_engine.pytorch.operands import Demand, Operands
from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Tensor,
)


class WeightQuantizer(Float8CurrentScalingQuantizer):
    """Quantises a weight with the scale of its own values, under every recipe.

    Delayed scaling spares activations the pass that finds the largest magnitude before the cast. A
    weight is written once a step, by an optimizer that reads all of it anyway, and what a scale of
    the past clips or flushes to zero is lost for good: there is no other copy.

    Args:
        family: `"delayed"` or `"current"`, the recipes that may use the weight; None for both.
        power_of_2: round scales down to powers of two.
        epsilon: least amax.
        margin: scales are divided by `2 ** margin`.
        label: which parameter of which layer this is.
    """

    def __init__(
        self,
        family: str | None = None,
        power_of_2: bool = False,
        epsilon: float = 0.0,
        margin: int = 0,
        label: str = "",
    ) -> None:
        super().__init__(
            E4M3, columnwise=False, force_pow_2_scales=power_of_2, amax_epsilon=epsilon
        )
        self.family = family
        self.margin = margin
        self.label = label

    @classmethod
    def of(cls, recipe: Recipe | None, label: str) -> WeightQuantizer:
        """For a recipe of `quantized_model_init`."""
        if isinstance(recipe, DelayedScaling):
            return cls("delayed", margin=recipe.margin, label=label)
        if isinstance(recipe, Float8CurrentScaling):
            weight = recipe.fp8_quant_fwd_weight
            power_of_2 = recipe.use_power_2_scales or weight.power_2_scale
            return cls("current", power_of_2, weight.amax_epsilon, label=label)
        return cls(label=label)

    def serves(self, recipe: Recipe | None) -> bool:
        """Whether GEMMs of a recipe can take the weight as it is."""
        if recipe is None or not recipe.float8_per_tensor_scaling():
            return False
        return self.family in (None, "delayed" if recipe.delayed() else "current")

    def pickled(self, weight: Float8Tensor, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        """What pickle makes a weight of again, without running code of its own."""
        own = (self.family, self.power_of_2, self.epsilon, self.margin, self.label)
        needs_grad = weight.requires_grad if isinstance(weight, nn.Parameter) else None
        return _rebuild_weight, (*parts, own, needs_grad)

    def operands(self, x: torch.Tensor, demand: Demand) -> Operands:
        """Find the scale, then cast."""
        scales = current_scales(x, self.format, self.power_of_2, self.epsilon)
        if self.margin:
            factor = 2.0**self.margin
            scales = torch.cat([scales[:1] * factor, scales[1:] / factor])
        return self.cast(x, scales, demand)


def _rebuild_weight(
    shape: torch.Size,
    dtype: torch.dtype,
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    fp8_dtype: int,
    quantizer: tuple[Any, ...],
    needs_grad: bool | None,
) -> torch.Tensor:
    """What `torch.save` writes of a weight; `needs_grad` is None where it was no parameter."""
    own = WeightQuantizer(*quantizer)
    weight = Float8Tensor(shape, dtype, data, scale_inv, fp8_dtype, quantizer=own)
    return weight if needs_grad is None else nn.Parameter(weight, needs_grad)


torch.serialization.add_safe_globals([_rebuild_weight])
