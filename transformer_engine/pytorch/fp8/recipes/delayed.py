"""`DelayedScaling`: every cast has a scale and a history of amaxes in the module's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import index
from typing import TYPE_CHECKING, Any

import torch

from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.fp8.casts.batches import cast_together
from transformer_engine.pytorch.fp8.casts.operands import (
    FusedArguments,
    FusedOutputs,
    OperandRequest,
    Operands,
)
from transformer_engine.pytorch.fp8.casts.quantizers import (
    Fp8Quantizer,
    GemmQuantizers,
    Quantizer,
    Tensors,
)
from transformer_engine.pytorch.fp8.recipes.base import GemmColumns, RecipeRules, register
from transformer_engine.pytorch.kernels.delayed_scaling import delayed_scaling_update, gather_amax
from transformer_engine.pytorch.scale_layout import WHOLE, ScaleLayout

if TYPE_CHECKING:
    from transformer_engine.pytorch.fp8.scaling_state import ScalingMembers, ScalingState


class DelayedQuantizer(Fp8Quantizer, native=True):
    """Casts with a scale that past amaxes determine, and records the amax for later scales.

    Args:
        scale: fp32 `[1]`, read by the kernel.
        amax: fp32 `[1]`, raised to `max |x|`; None to record none (evaluation).
        format: value of `DType`.
    """

    scaling = "fp8_delayed_scaling"
    rounds_once = True
    recasts_alike = False
    casts_columns_later = True
    casts_many = True
    shard_rows = 1

    def __init__(self, scale: torch.Tensor, amax: torch.Tensor | None, format: int) -> None:
        super().__init__(format)
        self.scale = scale
        self.amax = amax

    def constants(self) -> tuple[Any, ...]:
        """The format."""
        return (self.format,)

    @classmethod
    def rebuilt(cls, description: Any, column: Any) -> Quantizer:
        """The quantizer with the scale and amax of the column."""
        scale, amax = column
        return cls(scale, amax, description[1])

    def operands(self, x: torch.Tensor, request: OperandRequest) -> Operands:
        """Cast with the stored scale, in one pass."""
        return self.cast_with(x, request, self.scale, self.amax)

    @classmethod
    def cast_many(
        cls, tensors: list[torch.Tensor], requests: Sequence[OperandRequest]
    ) -> list[Operands]:
        """Cast with the stored scales, in one pass."""
        quantizers: list[Any] = [request.quantizer for request in requests]
        scales = [quantizer.scale for quantizer in quantizers]
        amaxes = [quantizer.amax for quantizer in quantizers if quantizer.amax is not None]
        pairs = [x.new_empty(2, dtype=torch.float32) for x in tensors]
        return cast_together(tensors, requests, pairs, scales, amaxes)

    def fused_arguments(self, request: OperandRequest | None) -> FusedArguments:
        """The fused kernel does the whole cast."""
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

    def fused_result(self, request: OperandRequest | None, made: FusedOutputs) -> Operands:
        """The operands."""
        assert made.scales is not None
        return self.pack(made.codes, made.transposed, made.scales, made.bias_grad)

    def for_recompute(self, scale: torch.Tensor | None) -> Quantizer:
        """A quantizer of the same format with the given scale, which records no amax."""
        assert scale is not None
        return DelayedQuantizer(scale, None, self.format)

    def of_shards(self, group: Any) -> Quantizer:
        """The quantizer itself: ranks have equal scales, and reduce amaxes at the end of a step."""
        return self

    def persistent_tensors(self) -> Tensors:
        """The scale, and the amax where it is raised."""
        return (self.scale,) if self.amax is None else (self.scale, self.amax)

    def exported_scale(self, x: torch.Tensor) -> torch.Tensor:
        """The stored scale."""
        return self.scale.reshape(())


_NUMBERS = ("margin", "interval", "amax_history_len")
_OTHERS = tuple(one.name for one in fields(DelayedScaling) if one.name not in _NUMBERS)


@register(DelayedScaling)
class DelayedRules(RecipeRules):
    """The rules of `DelayedScaling`."""

    keeps_state = True
    scaling = DelayedQuantizer.scaling
    fp8_attention = True
    exportable = True
    weight_family = "delayed"

    def constants(self, recipe: DelayedScaling) -> tuple[tuple[str, Any], ...] | None:
        """The fields; None for a subclass of the recipe, and if a field is a function."""
        functions = callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo
        if functions or type(recipe) is not DelayedScaling:
            return None
        # Dynamo may make a symbol of a number that changes between calls; `index` gives its value.
        numbers = [(name, index(getattr(recipe, name))) for name in _NUMBERS]
        return tuple([(name, getattr(recipe, name)) for name in _OTHERS] + numbers)

    def gemm_quantizers(
        self, recipe: DelayedScaling, columns: GemmColumns | None
    ) -> GemmQuantizers:
        """Casts with the scales of the state; gradients are cast if they have columns."""
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
        """One launch for all states; the recipe's own functions are called state by state."""
        recipe: DelayedScaling = members.recipe
        algorithm, table = recipe.amax_compute_algo, members.table(states).rows
        own: _Values = (None, None)
        if callable(algorithm) or recipe.scaling_factor_compute_algo is not None:
            own = _call_functions(members, states, amaxes)
        named = "most_recent" if callable(algorithm) else algorithm
        delayed_scaling_update(table, amaxes, named, members.fp8_max, recipe.margin, *own)

    def weight_layout(self, recipe: DelayedScaling) -> ScaleLayout:
        """One scale for the whole weight."""
        return WHOLE

    def weight_settings(self, recipe: DelayedScaling) -> dict[str, Any]:
        """The margin; the scale comes from the values themselves, see `WeightQuantizer`."""
        return {"family": self.weight_family, "margin": recipe.margin}


_Values = tuple[torch.Tensor | None, torch.Tensor | None]


def _call_functions(
    members: ScalingMembers, states: list[ScalingState], reduced: torch.Tensor | None
) -> _Values:
    """The amaxes and scales that the recipe's own functions return, fp32 `[columns]` of all states.

    In the histories that they get, row 0 has the amaxes of all ranks, and NaN is replaced by 0.
    """
    recipe: DelayedScaling = members.recipe
    find_amax, find_scale = recipe.amax_compute_algo, recipe.scaling_factor_compute_algo
    named = "most_recent" if callable(find_amax) else find_amax
    table = members.table(states)
    amaxes = gather_amax(table.rows, table.columns, reduced, named)
    scales = torch.empty_like(amaxes) if find_scale is not None else None
    start = 0
    for state in states:
        columns = slice(start, start + state.scale.numel())
        start = columns.stop
        if callable(find_amax):
            history = state.amax_history.masked_fill(state.amax_history.isnan(), 0.0)
            history[0] = amaxes[columns]
            amaxes[columns] = find_amax(history)
        if scales is not None and find_scale is not None:
            scales[columns] = find_scale(amaxes[columns], state.scale, members.fp8_max, recipe)
    return amaxes, scales
