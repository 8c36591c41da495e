"""The parts of an optimizer's parameters on this rank, and how they are read and written.

A `Part` is made once a step, because operations on DTensors are slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.parallel.dtensors import is_dtensor, local_part
from transformer_engine.pytorch.parallel.meeting import group_or_world_size
from transformer_engine.pytorch.plain_tensors import PLAIN_TYPES
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.shards import initial_value, piece_of, with_piece
from transformer_engine.pytorch.tensor.weight_quantizer import is_cast_of
from transformer_engine.pytorch.tensor.writing import codes_around, is_in_weight, write


class Part(NamedTuple):
    """A parameter of an optimizer on this rank.

    Attributes:
        parameter: the parameter in the optimizer's groups.
        local: this rank's part of a DTensor; else the parameter.
        piece: the same as `local` if it is kept in FP8; else None.
    """

    parameter: torch.Tensor
    local: torch.Tensor
    piece: QuantizedTensor | None

    def own(self, state: torch.Tensor) -> torch.Tensor:
        """This rank's part of a state, which is a DTensor if the parameter is one."""
        return state if self.local is self.parameter else local_part(state)


def part_of(parameter: torch.Tensor) -> Part:
    """The part of a parameter of FusedAdam on this rank; call it with autograd off.

    Raises:
        NotImplementedError: see `refuse_slice`.
    """
    if type(parameter) in PLAIN_TYPES:
        return Part(parameter, parameter, None)
    local = local_part(parameter)
    piece = piece_of(parameter) if isinstance(local, QuantizedTensor) else None
    refuse_slice(piece, "FusedAdam")
    return Part(parameter, local, piece)


def refuse_slice(piece: QuantizedTensor | None, optimizer: str) -> None:
    """Refuse a slice of an FP8 weight where there are other processes.

    Raises:
        NotImplementedError: other processes may step other slices of the weight, and would not
            learn of its new scale.
    """
    if piece is not None and _is_slice(piece) and group_or_world_size(None) > 1:
        raise NotImplementedError(
            f"[{optimizer}] expected FP8 weights as a whole where there are several processes, got"
            f" a slice of {piece.label}: all slices have one scale, which no process would tell the"
            " others. In Megatron-Core, leave out use_precision_aware_optimizer, or take a recipe"
            " other than delayed scaling"
        )


def _is_slice(piece: QuantizedTensor) -> bool:
    """Whether a tensor is a slice of a weight; a flat view of the whole weight counts as one."""
    return codes_around(piece) is not None or (piece.ndim == 1 and is_in_weight(piece))


def check_gradients(parts: Sequence[Part], gradients: Sequence[Any], decoupled: bool) -> None:
    """Check gradients; torch has checked the shapes and dtypes of those that are not decoupled.

    Raises:
        TypeError: not a tensor; it or the parameter is not of floating point.
        RuntimeError: a sparse gradient.
        ValueError: another shape than that of the parameter, or of this rank's part of it.
    """
    if decoupled or not all(
        [x.layout is torch.strided and x.is_floating_point() for x in gradients]
    ):
        for part, gradient in zip(parts, gradients, strict=True):
            _check_gradient(part, gradient)


def _check_gradient(part: Part, gradient: Any) -> None:
    found = [part.parameter, gradient]
    if not all([isinstance(x, torch.Tensor) and x.is_floating_point() for x in found]):
        kinds = [getattr(x, "dtype", type(x).__name__) for x in found]
        raise TypeError(
            "[FusedAdam] expected a parameter and a gradient of floating point, got"
            f" {kinds[0]} and {kinds[1]}"
        )
    if gradient.layout is not torch.strided:
        raise RuntimeError("[FusedAdam] expected dense gradients, got sparse ones")
    expected = part.parameter.shape if is_dtensor(gradient) else part.local.shape
    if gradient.shape != expected:
        raise ValueError(
            f"[FusedAdam] expected a gradient of shape {tuple(expected)}, as its parameter, got"
            f" {tuple(gradient.shape)}"
        )


def local_gradient(part: Part, gradient: Any) -> torch.Tensor:
    """The gradient of a part; redistributed if its placements differ from the parameter's."""
    if not is_dtensor(gradient):
        return gradient
    wanted = getattr(part.parameter, "placements", gradient.placements)
    if gradient.placements != wanted:  # for example partial sums for a replicated weight
        gradient = gradient.redistribute(placements=wanted)
    return local_part(gradient)


def master_of(part: Part, state: Mapping[str, Any]) -> torch.Tensor:
    """The master weight of a part as it is stored; if the state has none, the part in fp32."""
    master = state.get("master_param")
    return part.local.float().contiguous() if master is None else part.own(master)


def zeros_for(parameter: torch.Tensor) -> torch.Tensor:
    """fp32 zeros of the parameter's shape, contiguous, as kernels of optimizers require."""
    return torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.contiguous_format)


def state_with(value: torch.Tensor, parameter: torch.Tensor, name: str) -> torch.Tensor:
    """A new fp32 state of a parameter, filled with a value for the parameter or this rank's piece.

    Raises:
        ValueError: another shape.
    """
    made = zeros_for(parameter)
    own = made if is_dtensor(value) else local_part(made)
    if value.shape != own.shape:
        raise ValueError(
            f"[FusedAdam] expected {name} of shape {tuple(own.shape)}, got {tuple(value.shape)}"
        )
    own.copy_(value)
    return made


def initial_master(part: Part, clears: bool) -> torch.Tensor:
    """The first master weight of a parameter: the parameter in fp32.

    For an FP8 weight it is the value before the cast, if that is kept and still gives these codes.
    With `clears` the kept value is freed before the cast.
    """
    parameter, _, piece = part
    initial = initial_value(parameter)
    value = None if initial is None else initial.get()
    if value is not None and piece is not None:
        if clears:
            initial.clear()
        value = value.to(parameter.device)
        if is_cast_of(piece, value):
            return with_piece(parameter, value.float())
    if piece is None:
        return parameter.detach().float()
    return with_piece(parameter, piece.dequantize(dtype=torch.float32))


def write_values(parts: Sequence[Part], values: Sequence[torch.Tensor]) -> None:
    """Round values into parts; FP8 weights are written together."""
    write_plain(parts, values)
    write_quantized(parts, values)


def write_plain(parts: Sequence[Part], values: Sequence[torch.Tensor]) -> None:
    """Round values into parts that are not in FP8; some values may be the parts themselves."""
    for (_, local, piece), value in zip(parts, values, strict=True):
        if piece is None and value is not local:
            local.copy_(value)


def write_quantized(
    parts: Sequence[Part],
    values: Sequence[torch.Tensor],
    amaxes: Sequence[torch.Tensor | None] = (),
) -> None:
    """Round values into FP8 weights, all at once; see `tensor.writing.write`."""
    found = [(i, part.piece) for i, part in enumerate(parts) if part.piece is not None]
    known = [amaxes[i] for i, _ in found] if amaxes else []
    write([piece for _, piece in found], [values[i] for i, _ in found], known)


def count_writes(parts: Sequence[Part]) -> None:
    """Increment the version of DTensors, of which only the local parts were written."""
    written = [part.parameter for part in parts if is_dtensor(part.parameter)]
    if written:
        torch.autograd.graph.increment_version(written)
