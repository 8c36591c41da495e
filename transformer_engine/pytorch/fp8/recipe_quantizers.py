"""From a scope to the quantizers of a module's GEMMs, with the scaling state that they need.

Also the documented import path of `autocast`, `quantized_model_init` and `FP8GlobalStateManager`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, NamedTuple

import torch

from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    QParams,
    Recipe,
)
from transformer_engine.pytorch.dtypes import E4M3, E5M2
from transformer_engine.pytorch.export.onnx import exporting, refuse, trained_scales
from transformer_engine.pytorch.fp8.autocast import Scope, autocast, autocast_stack
from transformer_engine.pytorch.fp8.model_init import quantized_model_init
from transformer_engine.pytorch.fp8.quantizers import CalibratingQuantizer, GemmQuantizers
from transformer_engine.pytorch.fp8.recipes.blocks import BlockQuantizer
from transformer_engine.pytorch.fp8.recipes.current import CurrentQuantizer
from transformer_engine.pytorch.fp8.recipes.delayed import DelayedQuantizer
from transformer_engine.pytorch.fp8.scaling_state import BACKWARD, FORWARD, ScalingState
from transformer_engine.pytorch.fp8.state_manager import FP8GlobalStateManager
from transformer_engine.pytorch.recompute.compiled_scales import count_amaxes, scales_of_call

if TYPE_CHECKING:
    from transformer_engine.pytorch.fp8.scaled_module import ScaledModule
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

__all__ = [
    "FEATURE_ALIGNMENT",
    "FP8GlobalStateManager",
    "autocast",
    "build_quantizers",
    "quantized_model_init",
]

FEATURE_ALIGNMENT = 16


# Columns of a module's state, per GEMM: (input, weight, output) forward, (grad_output, grad_input)
# backward.
FORWARD_COLUMNS, BACKWARD_COLUMNS = 3, 2
_CAST_COLUMNS = 2  # the first ones: outputs stay in high precision


def forward_format(recipe: Recipe) -> int:
    """Format of activations and weights."""
    return E4M3


def backward_format(recipe: Recipe) -> int:
    """Format of gradients."""
    return E5M2 if recipe.fp8_format is Format.HYBRID else E4M3  # type: ignore[attr-defined]


class Columns(NamedTuple):
    """What calls cast with: some columns of a module's forward state, in order.

    Attributes:
        scales: fp32 `[1]` each.
        amaxes: that casts raise, fp32 `[1]` each; None where they leave no trace.
        values: of one call of compiled code, see `scales_of_call`, if it may run again.
        counted: the amaxes of the step, where those of that call are to be counted.
    """

    scales: Sequence[torch.Tensor]
    amaxes: Sequence[torch.Tensor | None]
    values: torch.Tensor | None = None
    counted: Sequence[torch.Tensor] = ()

    def note_amaxes(self, after: torch.Tensor) -> None:
        """Count the amaxes of a call, of which `after` is a result."""
        if self.values is not None:
            count_amaxes(after, self.values, [*self.counted])


def columns_of(
    state: ScalingState, indices: Sequence[int], recording: bool, runs_again: bool
) -> Columns:
    """These columns of a module's forward state, in the scope that is open.

    Args:
        state: of the module.
        indices: of the columns.
        recording: amaxes are taken down.
        runs_again: compiled code that may compute this call again in its backward.
    """
    scales = [state.scales[i] for i in indices]
    amaxes = [state.amaxes[i] for i in indices]
    untraced: list[torch.Tensor | None] = [None] * len(indices)
    unsettled = autocast_stack().unsettled
    if not (unsettled or (recording and torch.compiler.is_compiling())):
        return Columns(scales, amaxes if recording else untraced)
    rows = 2 if recording and runs_again else 1
    values = scales_of_call(scales, unsettled, recording, rows)
    own = [[row[i : i + 1] for i in range(len(indices))] for row in values.unbind()]
    if rows == 1:
        return Columns(own[0], amaxes if recording else untraced)
    return Columns(own[0], own[1], values, amaxes)


class Built(NamedTuple):
    """Quantizers of a module's GEMMs in one scope.

    Attributes:
        gemms: one for each.
        moved: the module's scaling state changed place.
        columns: of that state, in the forward; None without one.
    """

    gemms: list[GemmQuantizers]
    moved: bool = False
    columns: Columns | None = None


def build_quantizers(
    module: TransformerEngineBaseModule, scope: Scope, recording: bool, device: torch.device
) -> Built:
    """One `GemmQuantizers` per GEMM of the module.

    Under delayed scaling this creates, fits and registers the module's scaling state; calls that
    autograd does not record leave no amax behind, so evaluation changes nothing.
    """
    recipe = scope.recipe
    if isinstance(recipe, Float8CurrentScaling | Float8BlockScaling):
        if exporting() and isinstance(recipe, Float8BlockScaling):
            refuse("Float8BlockScaling", "export under another recipe", module.name)
        stateless = _current if isinstance(recipe, Float8CurrentScaling) else _blocks
        one = stateless(recipe) if scope.enabled else GemmQuantizers()  # type: ignore[arg-type]
        return Built([one] * module.gemm_count)
    assert isinstance(recipe, DelayedScaling)
    if exporting():
        state = trained_scales(module.scaling, module.name)
        return Built([_trained(recipe, state, i) for i in range(module.gemm_count)])
    forward, moved = state_of(module, recipe, FORWARD, device)
    backward, _ = state_of(module, recipe, BACKWARD, device)
    indices = range(module.gemm_count)
    if not scope.enabled:
        return Built([_calibrating(forward, i) for i in indices], moved)
    cast = [FORWARD_COLUMNS * gemm + i for gemm in indices for i in range(_CAST_COLUMNS)]
    columns = columns_of(forward, cast, recording, autocast_stack().runs_again)
    gemms = [_delayed(recipe, columns, backward, i) for i in indices]
    return Built(gemms, moved, columns)


def check_columns(scaling: dict[str, ScalingState], gemms: int, layer: str) -> None:
    """Check that a state which was loaded is of so many GEMMs.

    Raises:
        ValueError: it is of another number.
    """
    for direction, columns in ((FORWARD, FORWARD_COLUMNS), (BACKWARD, BACKWARD_COLUMNS)):
        state = scaling.get(direction)
        if state is not None and state.scale.numel() != gemms * columns:
            raise ValueError(
                f"[load_state_dict] expected the FP8 state of {gemms} GEMMs, {gemms * columns} "
                f"{direction} scales, got {state.scale.numel()} (layer {layer})"
            )


def state_of(
    module: ScaledModule,
    recipe: DelayedScaling,
    direction: str,
    device: torch.device,
) -> tuple[ScalingState, bool]:
    """A module's state, fitted to the recipe and registered; and whether it changed place."""
    columns = module.gemm_count * (FORWARD_COLUMNS if direction == FORWARD else BACKWARD_COLUMNS)
    state = module.scaling.get(direction)
    if state is None:
        state = ScalingState(direction, columns, recipe.amax_history_len, device)
        module.scaling[direction] = state
    before = (state.version, state.member_of)
    state.fit(recipe.amax_history_len, device)
    if device.type != "meta":
        autocast_stack().members[direction].add(state)
    return state, before != (state.version, state.member_of)


def _delayed(
    recipe: DelayedScaling, forward: Columns, backward: ScalingState, gemm: int
) -> GemmQuantizers:
    def quantizer(column: int) -> DelayedQuantizer:
        scale, amax = forward.scales[column], forward.amaxes[column]
        return DelayedQuantizer(scale, amax, forward_format(recipe))

    first, of_grad = _CAST_COLUMNS * gemm, BACKWARD_COLUMNS * gemm
    amax = backward.amaxes[of_grad] if forward.amaxes[first] is not None else None
    return GemmQuantizers(
        input=quantizer(first),
        weight=quantizer(first + 1),
        grad_output=DelayedQuantizer(backward.scales[of_grad], amax, backward_format(recipe)),
    )


def _trained(recipe: DelayedScaling, forward: ScalingState, gemm: int) -> GemmQuantizers:
    first, format = FORWARD_COLUMNS * gemm, forward_format(recipe)
    return GemmQuantizers(
        input=DelayedQuantizer(forward.scales[first], None, format),
        weight=DelayedQuantizer(forward.scales[first + 1], None, format),
    )


def with_weight_scales(
    scaling: dict[str, ScalingState], weights: Sequence[torch.Tensor]
) -> dict[str, ScalingState]:
    """The same states with the scales of weights kept in FP8, which modules do not cast.

    Modules that keep them in high precision start with these.

    Args:
        scaling: of a module.
        weights: fp32 `[2]` = {1/scale, scale}, one for each of its GEMMs.
    """
    forward = deepcopy(scaling[FORWARD])
    for gemm, scales in enumerate(weights):
        forward.scales[FORWARD_COLUMNS * gemm + 1].copy_(scales[1:])
    return {**scaling, FORWARD: forward}


def _calibrating(forward: ScalingState, gemm: int) -> GemmQuantizers:
    first = FORWARD_COLUMNS * gemm
    return GemmQuantizers(
        input=CalibratingQuantizer(forward.amaxes[first]),
        weight=CalibratingQuantizer(forward.amaxes[first + 1]),
    )


def _current(recipe: Float8CurrentScaling) -> GemmQuantizers:
    def quantizer(parameters: object, format: int) -> CurrentQuantizer:
        power_of_2 = recipe.use_power_2_scales or parameters.power_2_scale  # type: ignore[attr-defined]
        return CurrentQuantizer(format, power_of_2, parameters.amax_epsilon)  # type: ignore[attr-defined]

    gemms = GemmQuantizers(
        input=quantizer(recipe.fp8_quant_fwd_inp, forward_format(recipe)),
        weight=quantizer(recipe.fp8_quant_fwd_weight, forward_format(recipe)),
        grad_output=quantizer(recipe.fp8_quant_bwd_grad, backward_format(recipe)),
    )
    gemms.fast_accumulation = (
        not recipe.fp8_gemm_fprop.use_split_accumulator,
        not recipe.fp8_gemm_dgrad.use_split_accumulator,
        not recipe.fp8_gemm_wgrad.use_split_accumulator,
    )
    return gemms


def _blocks(recipe: Float8BlockScaling) -> GemmQuantizers:
    def quantizer(parameters: QParams, dimensions: int, format: int) -> BlockQuantizer:
        power_of_2 = parameters.power_2_scale and not recipe.use_f32_scales
        return BlockQuantizer(format, dimensions, power_of_2, parameters.amax_epsilon)

    forward, backward = forward_format(recipe), backward_format(recipe)
    gemms = GemmQuantizers(
        input=quantizer(recipe.fp8_quant_fwd_inp, recipe.x_block_scaling_dim, forward),
        weight=quantizer(recipe.fp8_quant_fwd_weight, recipe.w_block_scaling_dim, forward),
        grad_output=quantizer(recipe.fp8_quant_bwd_grad, recipe.grad_block_scaling_dim, backward),
    )
    gemms.fast_accumulation = (False, False, False)
    return gemms
