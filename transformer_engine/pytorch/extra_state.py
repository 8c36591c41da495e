"""`_extra_state`: FP8 scaling state as a uint8 tensor of fixed layout, never a pickle.

Layout, little endian: the magic bytes, then int32 {forward columns, backward columns, history
length}, then fp32 scale and amax history of forward and of backward. No state: an empty tensor.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from transformer_engine.pytorch.scaling_state import BACKWARD, FORWARD, ScalingState

MAGIC = b"TEFP8S01"
_HEADER = struct.Struct("<iii")


def pack(scaling: dict[str, ScalingState]) -> torch.Tensor:
    """The state of a module's two directions as CPU bytes."""
    if not scaling:
        return torch.empty(0, dtype=torch.uint8)
    states = [scaling[FORWARD], scaling[BACKWARD]]
    header = MAGIC + _HEADER.pack(
        states[0].scale.numel(), states[1].scale.numel(), states[0].amax_history.shape[0]
    )
    parts = [torch.frombuffer(bytearray(header), dtype=torch.uint8)]
    for state in states:
        for tensor in (state.scale, state.amax_history):
            parts.append(tensor.detach().cpu().reshape(-1).view(torch.uint8))
    return torch.cat(parts)


def unpack(state: Any, layer: str) -> dict[str, ScalingState]:
    """States from what `pack` made; empty for None, empty tensors and unknown contents.

    Contents of another origin (pickles of other versions) are never executed: they are skipped
    with a warning, and scaling starts anew.
    """
    if not isinstance(state, torch.Tensor) or state.numel() == 0:
        return {}
    raw = state.detach().cpu().contiguous().view(torch.uint8)
    header_size = len(MAGIC) + _HEADER.size
    header = bytes(raw[:header_size].tolist())
    if not header.startswith(MAGIC):
        warnings.warn(
            f"[load_state_dict] ignoring the _extra_state of another package version: FP8 scales "
            f"start anew (layer {layer})",
            stacklevel=3,
        )
        return {}
    forward, backward, length = _HEADER.unpack(header[len(MAGIC) :])
    expected = header_size + 4 * (1 + length) * (forward + backward)
    if raw.numel() != expected:
        raise ValueError(
            f"[load_state_dict] expected {expected} bytes of FP8 state, got {raw.numel()} "
            f"(layer {layer})"
        )
    values = raw[header_size:].clone().view(torch.float32)
    states, start = {}, 0
    for direction, columns in ((FORWARD, forward), (BACKWARD, backward)):
        restored = ScalingState(direction, columns, length, torch.device("cpu"))
        scale = values[start : start + columns]
        history = values[start + columns : start + columns * (1 + length)].view(length, columns)
        restored.replace(scale.clone(), history.clone())
        states[direction] = restored
        start += columns * (1 + length)
    return states


class OptionalExtraState:
    """A module whose `_extra_state` a checkpoint may lack, as those of plain torch layers do.

    Older versions have the key elsewhere; that is no error either.
    """

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        known = len(missing_keys), len(unexpected_keys)
        super()._load_from_state_dict(  # type: ignore[misc]
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for keys, first in zip((missing_keys, unexpected_keys), known, strict=True):
            keys[first:] = [key for key in keys[first:] if not key.endswith("_extra_state")]
