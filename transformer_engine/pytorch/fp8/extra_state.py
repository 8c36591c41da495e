"""`_extra_state`: FP8 scaling state as a uint8 tensor of fixed layout, never a pickle.

Layout, little endian: the magic bytes, then int32 {forward columns, backward columns, history
length}, then fp32 scale and amax history of forward and of backward (all counts are 0 without
delayed scaling), then the scales of every weight that is kept in FP8, in the order of the module's
parameters: fp32 {1/scale, scale}, or the inverse scales of its blocks. A module with neither has an
empty tensor.
"""

from __future__ import annotations

import importlib
import io
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from transformer_engine.pytorch.fp8.scaling_state import BACKWARD, FORWARD, ScalingState, state_with
from transformer_engine.pytorch.notices import warn_once
from transformer_engine.pytorch.scale_layout import LAYOUTS
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor

MAGIC = b"TEFP8S01"
_HEADER = struct.Struct("<iii")
_START = len(MAGIC) + _HEADER.size
# Versions before 1.8 wrote a BytesIO. Loading it runs no code, and its bytes are not unpickled.
torch.serialization.add_safe_globals([io.BytesIO])
_PICKLES = (b"\x80", b"PK\x03\x04")  # protocol 2 and later; torch.save's archive


class StateBytes(torch.Tensor):
    """The uint8 tensor of a state dict, which pickles as a plain one.

    A model that has not run in FP8 has an empty state, and `torch.distributed.checkpoint` would
    refuse to load a tensor of another size into it. So it is told to write these bytes as an
    object, which replaces the empty state.
    """

    def __create_write_items__(self, fqn: str, state: torch.Tensor) -> list[Any]:
        # Slow to import; whoever calls this has imported it already.
        planner = importlib.import_module("torch.distributed.checkpoint.planner")
        index = planner.MetadataIndex(fqn)
        return [planner.WriteItem(index=index, type=planner.WriteItemType.BYTE_IO)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateBytes:
        copied = self.as_subclass(torch.Tensor).clone().as_subclass(StateBytes)
        return memo.setdefault(id(self), copied)


def pack(scaling: dict[str, ScalingState], weights: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """Scaling states of both directions, if any, and scales of FP8 weights, as bytes on the CPU."""
    if not (scaling or weights):
        return torch.empty(0, dtype=torch.uint8).as_subclass(StateBytes)
    states = [scaling[FORWARD], scaling[BACKWARD]] if scaling else []
    counts = [state.scale.numel() for state in states] or [0, 0]
    length = states[0].amax_history.shape[0] if states else 0
    header = MAGIC + _HEADER.pack(*counts, length)
    parts = [torch.frombuffer(bytearray(header), dtype=torch.uint8)]
    tensors = [t for state in states for t in (state.scale, state.amax_history)]
    for tensor in (*tensors, *weights):
        parts.append(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8))
    return torch.cat(parts).as_subclass(StateBytes)


def unpack(state: Any, layer: str, weights: Sequence[torch.Tensor] = ()) -> dict[str, ScalingState]:
    """The states that `pack` has packed; empty for None, empty tensors and unknown contents.

    Contents of another origin (pickles of other versions) are never executed: they are skipped with
    one warning, and scaling starts anew. Any of `weights`, those of the layer's GEMMs, may have
    been kept in FP8 where the state was made.

    Raises:
        ValueError: truncated, inconsistent or damaged contents.
    """
    raw = _bytes_of(state)
    if raw is None or not raw.numel():
        return {}
    if not _is_ours(raw):
        _announce(raw, layer)
        return {}
    (forward, backward, length), values = _contents(raw, layer)
    states, start = {}, 0
    for direction, columns in ((FORWARD, forward), (BACKWARD, backward)):
        if not columns:
            continue
        scale = values[start : start + columns]
        history = values[start + columns : start + columns * (1 + length)].view(length, columns)
        if not bool(((scale > 0) & scale.isfinite()).all()):
            raise ValueError(
                f"[load_state_dict] expected {direction} scales above 0 and finite, got "
                f"{scale.tolist()}: the FP8 state is damaged (layer {layer})"
            )
        states[direction] = state_with(direction, scale.clone(), history.clone())
        start += columns * (1 + length)
    _check_weight_scales(values[start:], weights, layer)
    return states


def _check_weight_scales(scales: torch.Tensor, weights: Sequence[torch.Tensor], layer: str) -> None:
    """Raise ValueError unless the numbers behind the scaling state can be scales of these weights.

    If the module keeps weights in FP8, any values pass: such a weight replaces a wrong scale.
    """
    quantized = [weight for weight in weights if isinstance(weight, QuantizedTensor)]
    lengths = {sum(weight.scales.numel() for weight in quantized)}
    for layout in (one for one in LAYOUTS.values() if one.transposes):
        sums = {0}
        for weight in weights:  # any subset of the weights may have been kept in FP8
            own = torch.Size(layout.scale_shape(*weight.shape)).numel()
            sums |= {some + own for some in sums}
        lengths |= sums
    count = scales.numel()
    sound = (
        bool(quantized)
        or not count
        or bool((scales.isfinite() & (scales >= 0)).all() & scales.any())
    )
    if count not in lengths or not sound:
        raise ValueError(
            "[load_state_dict] expected _extra_state to end with its amax history, or with scales "
            f"of {len(weights)} FP8 weight(s), got {4 * count} more bytes that are no such scales:"
            f" it is damaged, or that of another layer (layer {layer})"
        )


def weight_scales(state: Any, sizes: Sequence[int], layer: str) -> Sequence[torch.Tensor] | None:
    """The fp32 scales of each weight that was kept in FP8; None if their number does not fit.

    `state` is the entry of a state dict, `sizes` the number of scales of each weight. None also for
    a damaged state, which `unpack` refuses.
    """
    raw = _bytes_of(state)
    if raw is None or not _is_ours(raw):
        return None
    try:
        (forward, backward, length), values = _contents(raw, layer)
    except ValueError:
        return None
    scales = values[(forward + backward) * (1 + length) :]
    return scales.split(list(sizes)) if scales.numel() == sum(sizes) else None


def _bytes_of(state: Any) -> torch.Tensor | None:
    """The bytes of a state; None for None. Other objects give one byte that `pack` never writes."""
    if state is None:
        return None
    if isinstance(state, io.BytesIO):
        state = state.getvalue()
    if isinstance(state, bytes | bytearray):
        return torch.frombuffer(bytearray(state), dtype=torch.uint8) if state else None
    if not _holds_bytes(state):
        return torch.zeros(1, dtype=torch.uint8)
    return state.detach().as_subclass(torch.Tensor).cpu().contiguous().reshape(-1)


def _holds_bytes(state: Any) -> bool:
    """Whether it is a plain tensor of bytes; other tensors cannot be read as bytes."""
    return (
        isinstance(state, torch.Tensor)
        and not isinstance(state, QuantizedTensor)
        and state.dtype == torch.uint8
        and state.layout == torch.strided
        and not (state.is_meta or state.is_nested)
    )


def _is_ours(raw: torch.Tensor) -> bool:
    return bytes(raw[: len(MAGIC)].tolist()) == MAGIC


def _contents(raw: torch.Tensor, layer: str) -> tuple[tuple[int, int, int], torch.Tensor]:
    """The counts in the header, and all fp32 numbers after it.

    Raises:
        ValueError: the bytes do not fit the header.
    """
    header = bytes(raw[len(MAGIC) : _START].tolist())
    counts = _HEADER.unpack(header) if len(header) == _HEADER.size else (-1, -1, -1)
    forward, backward, length = counts
    expected = _START + 4 * (1 + length) * (forward + backward)
    if min(counts) < 0:
        raise ValueError(
            "[load_state_dict] expected _extra_state to say how many FP8 scales it has, got "
            f"{raw.numel()} bytes that do not: it is cut off or damaged (layer {layer})"
        )
    if counts.count(0) in (1, 2):
        raise ValueError(
            "[load_state_dict] expected _extra_state with scales of the forward, scales of the "
            "backward and an amax history of one step or more, or with none of the three, got "
            f"{forward}, {backward} and {length}: it is damaged (layer {layer})"
        )
    if raw.numel() < expected or (raw.numel() - expected) % 8:
        raise ValueError(
            f"[load_state_dict] expected _extra_state of {expected} bytes, as its first bytes say, "
            f"and 8 more for each FP8 weight, got {raw.numel()}: it is cut off or damaged (layer "
            f"{layer})"
        )
    return counts, raw[_START:].clone().view(torch.float32)


def _announce(raw: torch.Tensor, layer: str) -> None:
    """Warn once for each kind of state that is ignored; a checkpoint has one kind everywhere."""
    start = bytes(raw[:4].tolist())
    kind = "pickled" if start.startswith(_PICKLES) else "unknown"
    warn_once(
        "[load_state_dict] ignoring the _extra_state of another package version "
        f"({kind}, never unpickled): FP8 scales stay as they are (layer {layer}, and others like "
        "it)",
        about=f"{kind} _extra_state",
        stacklevel=4,
    )


class OptionalExtraState:
    """A module whose checkpoint may lack `_extra_state`, as those of plain torch layers do.

    Checkpoints of older versions may have it under another key (`former_extra_state`). If it is
    missing and the module has scaling state, one warning says that this state stays unchanged. A
    damaged one is reported by `load_state_dict` with its other errors, when all modules are loaded.
    """

    former_extra_state = ""  # the older key, without the module's prefix

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
        key, former = prefix + "_extra_state", prefix + self.former_extra_state
        if self.former_extra_state and key not in state_dict and former in state_dict:
            state_dict = {**state_dict, key: state_dict[former]}
        known = len(missing_keys), len(unexpected_keys)
        others = {name: value for name, value in state_dict.items() if name != key}
        super()._load_from_state_dict(  # type: ignore[misc]
            others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if key in state_dict and hasattr(self, "scaling"):
            try:
                self.set_extra_state(state_dict[key])  # type: ignore[attr-defined]
            except ValueError as error:
                error_msgs.append(str(error))
        for keys, first in zip((missing_keys, unexpected_keys), known, strict=True):
            keys[first:] = [name for name in keys[first:] if not name.endswith("_extra_state")]
        if getattr(self, "scaling", None) and key not in state_dict:
            warn_once(
                f"[load_state_dict] expected FP8 scaling state under {key!r}, which is missing: "
                f"scales stay as they are (layer {self.name}, and others like it)",  # type: ignore[attr-defined]
                about="missing _extra_state",
                stacklevel=3,
            )
