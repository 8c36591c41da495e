"""Whether a call is traced for ONNX, and the errors for calls that have no ONNX form."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack

if TYPE_CHECKING:
    from transformer_engine.pytorch.fp8.scaling_state import ScalingState


def exporting() -> bool:
    """Whether this call is traced for ONNX."""
    return autocast_stack().exporting and torch.compiler.is_exporting()


def exports_inference() -> bool:
    """See `AutocastStack`."""
    return autocast_stack().exports_inference


def refuse(what: str, instead: str, layer: str | None) -> NoReturn:
    """Raise NotImplementedError for a feature that has no ONNX form."""
    raise NotImplementedError(
        f"[onnx_export] {what} cannot be exported: {instead} (layer {layer or 'without a name'})"
    )


def refuse_training(training: bool, probabilities: dict[str, float], layer: str | None) -> None:
    """Raise NotImplementedError if a layer would draw random numbers."""
    for argument, probability in probabilities.items():
        if training and probability > 0.0:
            refuse(f"{argument}={probability} in training", "call model.eval() first", layer)


def trained_scales(scaling: dict[str, ScalingState], layer: str) -> ScalingState:
    """The scaling state of a layer's forward; raises RuntimeError if the layer has none."""
    state = scaling.get("forward")
    if state is None:
        raise RuntimeError(
            "[onnx_export] expected scales that training or calibration has left, got none: run"
            " the model under fp8_autocast with this recipe, or load a checkpoint, before exporting"
            f" it (layer {layer})"
        )
    return state
