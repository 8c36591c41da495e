"""FP8 weights of optimizers that keep fp32 masters in pieces, one for each data-parallel rank.

Megatron's distributed optimizer holds the codes of all weights in one buffer, has pieces of the
masters that end anywhere, and gathers codes after each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.pytorch.kernels.amax import amax, scales_from_amax
from transformer_engine.pytorch.kernels.quantize import quantize
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer, Float8Tensor
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor

__all__ = [
    "cast_master_weights_to_fp8",
    "post_all_gather_processing",
    "quantize_master_weights",
    "replace_raw_data",
]


def replace_raw_data(tensor: Any, new_raw_data: torch.Tensor) -> None:
    """Move the codes of a tensor into other memory, with their values.

    Args:
        tensor: of one scale, or with row-wise codes whose blocks have scales.
        new_raw_data: uint8, of the shape and on the device of the codes.

    Raises:
        TypeError: no quantised tensor.
        ValueError: memory of another kind, or no row-wise codes.
    """
    if not isinstance(tensor, QuantizedTensor):
        raise TypeError(
            f"[replace_raw_data] expected a quantised tensor, got {type(tensor).__name__}"
        )
    name = type(tensor).part_names[0]
    codes = getattr(tensor, name)
    if codes is None or (codes.shape, codes.dtype, codes.device) != (
        new_raw_data.shape,
        new_raw_data.dtype,
        new_raw_data.device,
    ):
        wanted = "row-wise codes" if codes is None else f"uint8 {tuple(codes.shape)}"
        raise ValueError(
            f"[replace_raw_data] expected {wanted} ({tensor.label}), got {new_raw_data.dtype}"
            f" {tuple(new_raw_data.shape)} on {new_raw_data.device}"
        )
    new_raw_data.detach().copy_(codes)
    setattr(tensor, name, new_raw_data)
    post_all_gather_processing([tensor])


def quantize_master_weights(
    model_weights: Sequence[Any],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Sequence[Any] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Cast this rank's pieces of fp32 masters into the codes of weights with one scale.

    The scale of a weight is that of all its pieces: one collective for all weights. Codes of
    other pieces are left as they are, for a gather that follows.

    Args:
        model_weights: `Float8Tensor`s, the same on all ranks and in the same order.
        master_weights: fp32 pieces, flat; None where this rank has none of a weight.
        start_offsets: where each begins in its weight, read as flat.
        group: of the ranks with the other pieces; None is the default one, where there is one.
        fsdp_shard_model_weights: not implemented: `fully_shard` keeps pieces by itself.
        manual_post_all_gather_processing: the caller will call `post_all_gather_processing`. The
            transposed codes are dropped here in any case, and made again when they are needed.

    Raises:
        ValueError: lists of different lengths; pieces that reach beyond their weights.
        TypeError: weights of another kind.
        NotImplementedError: `fsdp_shard_model_weights` with anything but None in it.
    """
    del manual_post_all_gather_processing
    if any(shard is not None for shard in fsdp_shard_model_weights or ()):
        raise NotImplementedError(
            "[quantize_master_weights] fsdp_shard_model_weights: fully_shard keeps pieces of FP8"
            " weights by itself"
        )
    pieces = [*zip(model_weights, master_weights, start_offsets, strict=True)]
    for weight, master, start in pieces:
        _check(weight, master, start)
    if not pieces:
        return
    device = model_weights[0].device
    none = torch.zeros(1, device=device)
    amaxes = torch.cat([none if m is None else amax(_row(m)) for _, m, _ in pieces])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
    for (weight, master, start), largest in zip(pieces, amaxes.split(1), strict=True):
        _write(weight, master, start or 0, largest)


cast_master_weights_to_fp8 = quantize_master_weights


def post_all_gather_processing(model_weights: Sequence[Any]) -> None:
    """Drop what was made of codes that a gather has replaced (it is made again on demand)."""
    for weight in model_weights:
        if isinstance(weight, Float8Tensor):
            weight.update_usage(columnwise_usage=False)


def _check(weight: Any, master: torch.Tensor | None, start: int | None) -> None:
    if not isinstance(weight, Float8Tensor):
        raise TypeError(
            "[quantize_master_weights] expected weights of one scale (Float8Tensor), got"
            f" {type(weight).__name__}"
        )
    if master is not None and not 0 <= (start or 0) <= weight.numel() - master.numel():
        raise ValueError(
            f"[quantize_master_weights] expected a piece of {weight.numel()} values"
            f" ({weight.label}), got {master.numel()} from {start} on"
        )


def _write(
    weight: Float8Tensor, master: torch.Tensor | None, start: int, largest: torch.Tensor
) -> None:
    """Set the scale of a weight, and the codes of a piece."""
    scales = _scales(weight, largest)
    weight._scale_inv.copy_(scales[: weight._scale_inv.numel()])
    weight.update_usage(columnwise_usage=False)
    if master is None or not master.numel():
        return
    codes = quantize(_row(master), weight._format, None, None, scales, True, False, None)[0]
    assert codes is not None
    weight._data.view(-1)[start : start + master.numel()].copy_(codes.view(-1))


def _scales(weight: Float8Tensor, largest: torch.Tensor) -> torch.Tensor:
    """The scales with which a weight of this largest magnitude is cast: {1/scale, scale}."""
    quantizer: Any = weight._quantizer
    if isinstance(quantizer, Float8Quantizer):  # the scale is known before
        if quantizer.amax is not None:
            quantizer.amax.copy_(torch.maximum(quantizer.amax, largest))
        scale = quantizer.scale.detach().float().reshape(1)
        return torch.cat([scale.reciprocal(), scale])
    if getattr(quantizer, "writes_weights", False):
        found: torch.Tensor = quantizer.scales_of(largest.clone())
        return found
    power_of_2, epsilon = (getattr(quantizer, n, 0) for n in ("power_of_2", "epsilon"))
    return scales_from_amax(largest.clone(), weight._format, bool(power_of_2), float(epsilon))


def _row(master: torch.Tensor) -> torch.Tensor:
    return master.detach().reshape(1, -1).contiguous()
