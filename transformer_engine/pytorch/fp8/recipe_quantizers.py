"""From a scope to the quantizers of a module's GEMMs, with the scaling state that they need.

Also the documented import path of `autocast`, `quantized_model_init` and `FP8GlobalStateManager`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from transformer_engine.pytorch.fp8.autocast import autocast
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.fp8.casts.operands import OperandRequest, Operands
from transformer_engine.pytorch.fp8.casts.quantizers import (
    DESCRIBED,
    IDENTITY,
    GemmQuantizers,
    IdentityQuantizer,
    Quantizer,
    Tensors,
)
from transformer_engine.pytorch.fp8.compiled_scales import count_amaxes, scales_of_call
from transformer_engine.pytorch.fp8.exporting import exporting, refuse, trained_scales
from transformer_engine.pytorch.fp8.model_init import quantized_model_init
from transformer_engine.pytorch.fp8.process_state import Scope, process_state
from transformer_engine.pytorch.fp8.recipes.base import GemmColumns, rules_of
from transformer_engine.pytorch.fp8.scaling_state import (
    ALIGNED,
    BACKWARD,
    FORWARD,
    ScalingGroup,
    ScalingState,
    columns_in,
)
from transformer_engine.pytorch.fp8.state_manager import FP8GlobalStateManager
from transformer_engine.pytorch.kernels.amax import amax as amax_of

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
_CAST_COLUMNS = 2  # input and weight are cast; outputs stay in high precision
_NO_TENSORS: Any = (None, None)
_WITHOUT_TENSORS = GemmColumns(_NO_TENSORS, _NO_TENSORS, _NO_TENSORS)


class Columns(NamedTuple):
    """Scales and amaxes for the casts of a call: columns of a module's forward state, in order.

    Attributes:
        scales: fp32 `[1]` each.
        amaxes: fp32 `[1]` each, raised by the casts; None where amaxes are not recorded.
        call_values: returned by `scales_of_call`, in compiled code that may be recomputed; else
            None. Then `scales` and `amaxes` are views of it.
        step_amaxes: the amaxes of the module's state, if `call_values` is set.
    """

    scales: Sequence[torch.Tensor]
    amaxes: Sequence[torch.Tensor | None]
    call_values: torch.Tensor | None = None
    step_amaxes: Sequence[torch.Tensor] = ()

    def record_amaxes(self, after: torch.Tensor) -> None:
        """Add the amaxes of a call in compiled code to those of the step; `after` is its result."""
        if self.call_values is not None:
            count_amaxes(after, self.call_values, [*self.step_amaxes])


def columns_of(
    scales: Sequence[torch.Tensor],
    amaxes: Sequence[torch.Tensor],
    counts: bool,
    flush: bool,
    recomputed: bool,
) -> Columns:
    """Columns of a module's forward state, for a call; scales and amaxes are fp32 `[1]` each.

    `flush` says that the scope was entered in compiled code, `recomputed` that the backward of a
    compiled graph may recompute the call.
    """
    untraced: list[torch.Tensor | None] = [None] * len(scales)
    if not (flush or (counts and torch.compiler.is_compiling())):
        return Columns(scales, amaxes if counts else untraced)
    rows = 2 if counts and recomputed else 1
    values = scales_of_call([*scales], flush, counts, rows)
    own = [
        [row[i : i + 1] for i in range(0, ALIGNED * len(scales), ALIGNED)]
        for row in values.unbind()
    ]
    if rows == 1:
        return Columns(own[0], amaxes if counts else untraced)
    return Columns(own[0], own[1], values, amaxes)


class ModuleQuantizers(NamedTuple):
    """The quantizers of a module in one scope.

    Attributes:
        gemms: the quantizers of each GEMM.
        moved: the module's scaling state has moved to other memory.
        columns: columns of the forward state; None without scaling state.
        state: memory of the scaling state, if quantizers have stand-ins (`chain.chain_operator`).
    """

    gemms: list[GemmQuantizers]
    moved: bool = False
    columns: Columns | None = None
    state: tuple[torch.Tensor, ...] = ()


def build_quantizers(
    module: TransformerEngineBaseModule,
    scope: Scope,
    counts: bool,
    device: torch.device,
    in_operator: bool = False,
) -> ModuleQuantizers:
    """One `GemmQuantizers` per GEMM of the module.

    If the recipe keeps state, this makes the module's scaling state, or fits it to the recipe.
    Calls without gradients (`counts` is False) leave no amax, so evaluation changes nothing.
    """
    recipe, rules = scope.recipe, rules_of(scope.recipe)
    if exporting() and not rules.exportable:
        refuse(type(recipe).__name__, "export under another recipe", module.name)
    if not rules.keeps_state:
        if not scope.enabled:
            return ModuleQuantizers([GemmQuantizers()] * module.gemm_count)
        return ModuleQuantizers(rules.module_quantizers(recipe, module))
    if exporting():
        trained = _trained_columns(module)
        return ModuleQuantizers([rules.gemm_quantizers(recipe, columns) for columns in trained])
    leaves_amaxes = scope.leaves_amaxes(counts)
    forward, backward, moved = states_of(module, recipe, device, leaves_amaxes)
    indices = range(module.gemm_count)
    if not scope.enabled:
        return ModuleQuantizers([_calibrating(forward, i) for i in indices], moved)
    cast = [FORWARD_COLUMNS * gemm + i for gemm in indices for i in range(_CAST_COLUMNS)]
    if in_operator:
        one = rules.gemm_quantizers(recipe, _WITHOUT_TENSORS)
        return ModuleQuantizers(
            [one] * module.gemm_count, moved, None, (forward.room, backward.room)
        )
    stack = autocast_stack()
    how = (counts, stack.flushes, stack.in_compiled_checkpoint)
    scales, amaxes = forward.columns(cast)
    columns = columns_of(scales, amaxes, *how)
    gemms = [
        rules.gemm_quantizers(recipe, _columns(columns, backward.scales, backward.amaxes, i))
        for i in indices
    ]
    return ModuleQuantizers(gemms, moved, columns)


def check_columns(scaling: dict[str, ScalingState], gemms: int, layer: str) -> None:
    """Raise ValueError if a loaded state is that of a module with another number of GEMMs."""
    for direction, columns in ((FORWARD, FORWARD_COLUMNS), (BACKWARD, BACKWARD_COLUMNS)):
        state = scaling.get(direction)
        if state is not None and state.scale.numel() != gemms * columns:
            raise ValueError(
                f"[load_state_dict] expected the FP8 state of {gemms} GEMMs, {gemms * columns} "
                f"{direction} scales, got {state.scale.numel()} (layer {layer})"
            )


def states_of(
    module: ScaledModule, recipe: Any, device: torch.device, leaves_amaxes: bool
) -> tuple[ScalingState, ScalingState, bool]:
    """A module's states, forward and backward, and whether that of the forward has moved.

    A call that leaves no amaxes accepts histories of any length and group. If an evaluation under
    another recipe replaced them, a backward that is still to come would find other histories.
    """
    group = None
    if torch.compiler.is_compiling():
        process_group, constants = autocast_stack().scope.group, rules_of(recipe).constants(recipe)
        if constants is None:
            group = process_state().compiled_group(recipe, process_group) if leaves_amaxes else None
        else:
            scope = (type(recipe), constants, process_group)
            made = module.make_compiled_state(device, *scope, leaves_amaxes)
            states = module.scaling.values() if leaves_amaxes else ()
            for state in states:  # a guard of the graph; not an assertion, which -O would drop
                own = state.compiled
                if own != made and device.type != "meta":
                    raise RuntimeError(f"[autocast] expected scaling group {made}, got {own}")
    forward, moved = state_of(module, recipe, FORWARD, device, group, leaves_amaxes)
    backward, _ = state_of(module, recipe, BACKWARD, device, group, leaves_amaxes)
    return forward, backward, moved


def state_of(
    module: ScaledModule,
    recipe: Any,
    direction: str,
    device: torch.device,
    group: ScalingGroup | None,
    leaves_amaxes: bool = True,
) -> tuple[ScalingState, bool]:
    """A module's state, fitted to the recipe, and whether it has moved to other memory.

    It joins `group`, if there is one: that of compiled code. See `states_of` for `leaves_amaxes`.
    """
    columns = module.gemm_count * (FORWARD_COLUMNS if direction == FORWARD else BACKWARD_COLUMNS)
    state = module.scaling.get(direction)
    if state is None:
        state = ScalingState(direction, columns, recipe.amax_history_len, device)
        module.scaling[direction] = state
    moved = state.fit(recipe.amax_history_len if leaves_amaxes else state.length, device)
    if group is not None and device.type != "meta":
        group.add(state)
    return state, moved


class StateInMemory(NamedTuple):
    """The scaling state of a module in a call, as the memory of its states.

    Attributes:
        forward: `ScalingState.room` of the forward.
        backward: `ScalingState.room` of the backward.
        counts: gradients are on.
        flush: see `columns_of`.
        recomputed: see `columns_of`; None for the scales themselves.
    """

    forward: torch.Tensor
    backward: torch.Tensor
    counts: bool
    flush: bool
    recomputed: bool | None

    def forward_columns(self, numbers: Sequence[int]) -> Columns:
        """These columns of the forward state."""
        scales, amaxes = columns_in(self.forward, numbers)
        if self.recomputed is not None:
            return columns_of(scales, amaxes, self.counts, self.flush, self.recomputed)
        return Columns(scales, amaxes if self.counts else [None] * len(scales))

    def backward_columns(self, numbers: Sequence[int]) -> list[list[torch.Tensor]]:
        """The scales of these columns of the backward state, and the amaxes."""
        return columns_in(self.backward, numbers)

    def gemm_columns(self, gemms: int) -> tuple[Columns, list[GemmColumns]]:
        """The columns of all GEMMs of the module."""
        cast = [FORWARD_COLUMNS * gemm + i for gemm in range(gemms) for i in range(_CAST_COLUMNS)]
        columns = self.forward_columns(cast)
        scales, amaxes = self.backward_columns(range(BACKWARD_COLUMNS * gemms))
        return columns, [_columns(columns, scales, amaxes, i) for i in range(gemms)]


def _columns(
    forward: Columns,
    scales: Sequence[torch.Tensor],
    amaxes: Sequence[torch.Tensor],
    gemm: int,
) -> GemmColumns:
    """The columns of one GEMM."""
    first, of_grad = _CAST_COLUMNS * gemm, BACKWARD_COLUMNS * gemm
    input, weight = [(forward.scales[i], forward.amaxes[i]) for i in (first, first + 1)]
    amax = None if input[1] is None else amaxes[of_grad]
    return GemmColumns(input, weight, (scales[of_grad], amax))


def _trained_columns(module: ScaledModule) -> list[GemmColumns]:
    """The columns of a trained module for inference: amaxes are not recorded."""
    scales = trained_scales(module.scaling, module.name).scales
    firsts = range(0, FORWARD_COLUMNS * module.gemm_count, FORWARD_COLUMNS)
    return [GemmColumns((scales[i], None), (scales[i + 1], None)) for i in firsts]


def with_weight_scales(
    scaling: dict[str, ScalingState], weights: Sequence[torch.Tensor]
) -> dict[str, ScalingState]:
    """The scaling states, with the scales of weights kept in FP8 in the columns of these weights.

    Such weights are never cast, so those columns do not have their scales. A module that loads the
    state but keeps its weights in high precision starts with them. `weights` are the scales of the
    weight of each GEMM, fp32 `[2]`.
    """
    forward = deepcopy(scaling[FORWARD])
    for gemm, scales in enumerate(weights):
        forward.scales[FORWARD_COLUMNS * gemm + 1].copy_(scales[1:])
    return {**scaling, FORWARD: forward}


def _calibrating(forward: ScalingState, gemm: int) -> GemmQuantizers:
    first = FORWARD_COLUMNS * gemm
    return GemmQuantizers(
        input=_CalibratingQuantizer(forward.amaxes[first]),
        weight=_CalibratingQuantizer(forward.amaxes[first + 1]),
    )


class _CalibratingQuantizer(IdentityQuantizer):
    """Leaves a tensor in high precision and records `max |x|`, so that FP8 can start from it."""

    def __init__(self, amax: torch.Tensor) -> None:
        self.amax = amax

    def operands(self, x: torch.Tensor, request: OperandRequest) -> Operands:
        self.record_amax(x)
        return super().operands(x, request)

    def record_amax(self, x: torch.Tensor) -> None:
        self.amax.copy_(amax_of(x))

    def for_recompute(self, scale: torch.Tensor | None) -> Quantizer:
        return IDENTITY  # a recompute records no amax

    def persistent_tensors(self) -> Tensors:
        return (self.amax,)


def described_gemm(description: Any, columns: Any) -> GemmQuantizers:
    """Rebuild the quantizers of a GEMM; `columns` is None without scaling state."""
    *six, override, accumulation = description
    of_each = (*(columns or (None, None, None)), None, None, None)
    made = [DESCRIBED[one[0]].rebuilt(one, own) for one, own in zip(six, of_each, strict=True)]
    gemm = GemmQuantizers(*made)
    gemm.backward_override, gemm.fast_accumulation = override, accumulation
    return gemm
