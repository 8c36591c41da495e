"""Weights that a module keeps in FP8: how they are made, moved, saved and loaded.

Such a parameter is a `QuantizedTensor`: codes and scales, and a nominal dtype that `weight.dtype`
reports. A state dict holds the dequantised values, and the scales in `_extra_state`, from which
loading restores the same codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from transformer_engine.pytorch.dtypes import HIGH_PRECISION
from transformer_engine.pytorch.fp8 import extra_state
from transformer_engine.pytorch.fp8.model_init import ModelInit
from transformer_engine.pytorch.fp8.recipe_quantizers import FEATURE_ALIGNMENT
from transformer_engine.pytorch.fp8.recipes.base import rules_of
from transformer_engine.pytorch.notices import warn_once
from transformer_engine.pytorch.scale_layout import WHOLE, layout_of
from transformer_engine.pytorch.tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.attributes import attributes_beside
from transformer_engine.pytorch.tensor.quantized_tensor import rowwise_of
from transformer_engine.pytorch.tensor.shards import (
    attach_initial_value,
    initial_value,
    piece_of,
    with_piece,
)
from transformer_engine.pytorch.tensor.weight_quantizer import WeightQuantizer
from transformer_engine.pytorch.tensor.writing import scale_ranks_of

if TYPE_CHECKING:
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

PART_OF_STATE = "_te_part_of_state"  # set on layers that ranks share, by `parallelize.checkpoints`
Apply = Callable[[torch.Tensor], torch.Tensor]


def make_parameter(values: torch.Tensor, init: ModelInit, label: str) -> nn.Parameter:
    """The parameter in FP8; in high precision, with a warning, if FP8 cannot take its sizes."""
    if any(n % FEATURE_ALIGNMENT for n in values.shape):
        warn_once(
            f"[quantized_model_init] {label} stays in {values.dtype}: expected sizes divisible by"
            f" {FEATURE_ALIGNMENT} for FP8, got {tuple(values.shape)}"
        )
        return nn.Parameter(values)
    rules = rules_of(init.recipe)
    layout = rules.weight_layout(init.recipe) or WHOLE
    settings = rules.weight_settings(init.recipe)
    quantizer = WeightQuantizer.for_layout(layout, label=label, **settings)
    parameter = nn.Parameter(quantizer.unwritten(values))
    if init.preserve:
        attach_initial_value(parameter)
    if not values.is_meta:
        initialize(parameter, values, init)
    return parameter


def initialize(parameter: Any, values: torch.Tensor, init: ModelInit) -> None:
    """Write its initial values into an FP8 parameter."""
    values = values.detach()
    parameter.quantize_(values)
    if init.preserve:
        initial = initial_value(parameter)
        if initial is None:  # a parameter without one was put in the place of the module's own
            initial = attach_initial_value(parameter)
        initial.set(values.clone() if values.device.type == "cpu" else values.cpu())


def fp8_weights(module: nn.Module) -> dict[str, QuantizedTensor]:
    """A module's own FP8 parameters by name, in order; this rank's pieces under `fully_shard`."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    pieces = {name: piece_of(parameter) for name, parameter in own.items()}
    return {name: piece for name, piece in pieces.items() if piece is not None}


def rename(module: nn.Module, layer: str) -> None:
    """Let messages about the module's FP8 weights use this name of the layer."""
    for name, weight in fp8_weights(module).items():
        quantizer: Any = weight._quantizer
        if getattr(quantizer, "writes_weights", False):
            weight._quantizer = quantizer.labelled(f"{name} of layer {layer}")


def apply_fn(module: nn.Module, function: Apply, to_others: Callable[[], Any]) -> None:
    """`nn.Module._apply`: codes move, the nominal dtype changes, the scales stay in fp32.

    `to_others` applies the function to everything that is not an FP8 parameter.
    """
    weights: dict[str, Any] = {name: module._parameters[name] for name in fp8_weights(module)}
    for name in weights:
        module._parameters[name] = None
    try:
        to_others()
    finally:
        module._parameters.update(weights)
    for name, weight in weights.items():
        module._parameters[name] = _applied(weight, function)


def _applied(parameter: Any, function: Apply) -> Any:
    """The parameter after `function`.

    If a DTensor changes its device or dtype, this is a new object; else the same one, changed.
    """
    weight = piece_of(parameter)
    assert weight is not None
    probe = function(torch.empty(0, dtype=weight.dtype, device=weight.device))
    if probe.dtype not in HIGH_PRECISION:
        raise TypeError(
            f"[quantized_model_init] expected float32, float16 or bfloat16 as the dtype of "
            f"{weight.label}, got {probe.dtype}"
        )
    parts = [None if part is None else _moved(part, function, probe) for part in weight.parts]
    if probe.dtype is weight.dtype and probe.device == weight.device:
        weight.adopt(parts)
        return parameter
    moved = weight.assembled(weight.shape, parts, {**weight.facts, "dtype": probe.dtype})
    other = nn.Parameter(with_piece(parameter, moved), parameter.requires_grad)
    if not isinstance(parameter, QuantizedTensor):
        return other
    _swap(parameter, other, function)
    return parameter


def materialised(parameter: Any, device: str) -> Any:
    """An uninitialised parameter on `device`, for one that `fully_shard` has cut on meta."""
    if piece_of(parameter) is not None:
        return _applied(parameter, lambda part: torch.empty_like(part, device=device))
    return nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)


def _swap(weight: QuantizedTensor, other: nn.Parameter, function: Apply) -> None:
    """Turn a parameter into `other` in place, so that all references to it see the change."""
    grad, weight.grad = weight.grad, None
    hooks = weight._backward_hooks, weight._post_accumulate_grad_hooks
    vars(other).update(attributes_beside(weight, other))
    try:
        torch.utils.swap_tensors(weight, other)
    except RuntimeError as error:
        raise RuntimeError(
            f"[quantized_model_init] {weight.label} cannot be moved or converted while something "
            f"else refers to it ({error})"
        ) from error
    weight.grad = None if grad is None else function(grad)
    # Set the hooks again: autograd knows them by the tensor that has been swapped out.
    weight._backward_hooks, weight._post_accumulate_grad_hooks = hooks


def _moved(part: torch.Tensor, function: Apply, probe: torch.Tensor) -> torch.Tensor:
    """A part after `function`: codes as it returns them, scales on its device but still in fp32."""
    if not part.is_floating_point():
        return function(part)
    if part.is_meta:
        return torch.empty_like(part, device=probe.device)
    moved = part.to(probe.device)
    return moved.share_memory_() if probe.is_shared() else moved


def dequantized(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Replace FP8 parameters in a state dict by plain tensors of their nominal dtype."""
    for name, weight in fp8_weights(module).items():
        parameter: Any = module._parameters[name]
        state[prefix + name] = with_piece(parameter, weight.plain_values())


def scales_of(module: nn.Module) -> list[torch.Tensor]:
    """The scales of every FP8 parameter that has values.

    An empty list if ranks have pieces of weights in blocks: each rank has the scales of its own
    piece, but a checkpoint has one state for all ranks.
    """
    weights = [w for w in fp8_weights(module).values() if not w.is_meta]
    if any(scale_ranks_of(w) and layout_of(w._format).in_blocks for w in weights):
        return []
    return [w.scales for w in weights]


def quantized(
    module: TransformerEngineBaseModule, state: Mapping[str, Any], prefix: str, assigned: bool
) -> Mapping[str, Any]:
    """A state dict in which plain tensors for FP8 parameters are quantised.

    If the tensors are assigned, not copied, the parameters get their device and, as the nominal
    dtype, their dtype. With the scales in `_extra_state` the original codes are restored. Without
    these scales, or if they do not restore the values, new scales are computed.
    """
    weights = fp8_weights(module)
    if not weights:
        return state
    raw = state.get(prefix + "_extra_state")
    sizes = [weight.scales.numel() for weight in weights.values()]
    scales = extra_state.weight_scales(raw, sizes, module.name)
    found: dict[str, Any] = {}
    part_of_state = getattr(module, PART_OF_STATE, None)
    for i, (name, weight) in enumerate(weights.items()):
        values = state.get(prefix + name)
        parameter: Any = module._parameters[name]
        if part_of_state is not None and isinstance(values, torch.Tensor):
            values = part_of_state(module, name, values)
        if not isinstance(values, torch.Tensor) or isinstance(values, QuantizedTensor):
            continue
        dense = values.layout == torch.strided and not values.is_meta
        if dense and values.shape == parameter.shape and values.is_floating_point():
            own = _own_piece(values, parameter)
            if own is not None and not isinstance(own, QuantizedTensor):
                cast = _cast(own, weight, None if scales is None else scales[i], assigned)
                found[prefix + name] = with_piece(parameter, cast)
    return {**state, **found}


def _own_piece(values: Any, parameter: Any) -> Any:
    """This rank's piece of values that a checkpoint holds as a DTensor.

    None for a plain tensor whose parameter is a DTensor: torch refuses to load that.
    """
    if isinstance(parameter, QuantizedTensor):
        return values
    if not hasattr(values, "redistribute"):
        return None
    with torch.no_grad():
        return values.redistribute(parameter.device_mesh, parameter.placements).to_local()


def _cast(
    values: torch.Tensor, weight: QuantizedTensor, scales: torch.Tensor | None, assigned: bool
) -> QuantizedTensor:
    device = values.device if assigned or weight.is_meta else weight.device
    high = values.dtype in HIGH_PRECISION
    nominal = values.dtype if assigned and high else weight.dtype
    dtype = values.dtype if high else torch.float32
    values = values.detach().to(device, dtype).contiguous().resolve_neg()
    quantizer = WeightQuantizer.writing(weight)
    matrix = quantizer.restored(values, scales, weight.dtype)
    return quantizer.holding(matrix.codes, matrix.scales, nominal)


def validate(module: TransformerEngineBaseModule, recipe: Any, enabled: bool) -> None:
    """Raise if the recipe cannot use the module's FP8 weights; warn if they are dequantised.

    Weights are dequantised if the call does not run in FP8 (`enabled` is False).
    """
    for name, weight in fp8_weights(module).items():
        rowwise = rowwise_of(weight)
        if rowwise is None:
            raise RuntimeError(
                f"[{type(module).__name__}] expected row-wise codes in {name!r}, got column-wise "
                f"codes alone (layer {module.name})"
            )
        quantizer = WeightQuantizer.writing(weight)
        if not enabled:
            _announce_dequantized(module, name)
        elif not (rules_of(recipe).takes(recipe, quantizer) and rowwise.layout.transposes):
            advice = "give quantized_model_init the recipe of autocast"
            if rules_of(recipe).weight_layout(recipe) is None:
                advice = "use another recipe here, no weight that is kept in FP8 can serve this one"
            raise RuntimeError(
                f"[{type(module).__name__}] Recipe mismatch for {name!r}: it was made for "
                f"{quantizer.made_for}, got {type(recipe).__name__}; {advice} (layer {module.name})"
            )


def _announce_dequantized(module: TransformerEngineBaseModule, name: str) -> None:
    module.warn_once(
        "outside autocast",
        f"[{type(module).__name__}] {name} is kept in FP8 and is dequantised for every call "
        f"outside of autocast (layer {module.name})",
    )
