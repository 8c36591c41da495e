"""FP8 weights for optimizers that keep fp32 master weights in pieces, one for each rank.

Megatron's distributed optimizer holds the codes of all weights in one buffer. Each data-parallel
rank has pieces of the master weights, which may begin and end within a row. After a step it casts
its pieces to FP8, with scales that all ranks have found together, and gathers the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.pytorch.fp8.casts.operands import OperandRequest
from transformer_engine.pytorch.kernels.amax import amax, current_scales
from transformer_engine.pytorch.kernels.quantize import quantize
from transformer_engine.pytorch.kernels.shapes import matrix_shape
from transformer_engine.pytorch.scale_layout import block_layout
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
)
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer, Float8Tensor
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.weight_quantizer import largest_of_blocks

__all__ = [
    "cast_master_weights_to_fp8",
    "post_all_gather_processing",
    "quantize_master_weights",
    "replace_raw_data",
]


def replace_raw_data(tensor: Any, new_raw_data: torch.Tensor) -> None:
    """Move the codes of a tensor into other memory, with their values.

    Args:
        tensor: a quantised tensor with row-wise codes.
        new_raw_data: uint8, of the shape and on the device of the codes.

    Raises:
        TypeError: not a quantised tensor.
        ValueError: memory of another shape, dtype or device; no row-wise codes.
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
    tensor._whole = None  # it is no view any more
    post_all_gather_processing([tensor])


def quantize_master_weights(
    model_weights: Sequence[Any],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Sequence[Any] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Cast this rank's pieces of fp32 masters into the codes of weights.

    A weight has one scale, or one for each block of 128 x 128 values. These scales follow from the
    amaxes of all pieces, which one all-reduce finds for all weights. The codes of other pieces are
    left as they are: the caller gathers them afterwards.

    Args:
        model_weights: `Float8Tensor`s and `Float8BlockwiseQTensor`s of square blocks, the same on
            all ranks and in the same order.
        master_weights: fp32 pieces, flat; None where this rank has none of a weight.
        start_offsets: index of the first value of each piece in its flattened weight.
        group: the ranks that have the other pieces; None is the default group, if there is one.
        fsdp_shard_model_weights: must be None. `fully_shard` keeps pieces by itself; trainers that
            shard weights in another way, such as Megatron-FSDP, need weights in high precision.
        manual_post_all_gather_processing: the caller will call `post_all_gather_processing`. It
            has no effect: transposed codes are dropped here in any case.

    Raises:
        ValueError: lists of different lengths; pieces that reach beyond their weights.
        TypeError: weights of another kind.
        NotImplementedError: `fsdp_shard_model_weights` with anything but None in it.
    """
    del manual_post_all_gather_processing
    for weight, shard in zip(model_weights, fsdp_shard_model_weights or (), strict=False):
        if shard is not None:
            raise NotImplementedError(
                "[quantize_master_weights] expected fsdp_shard_model_weights=None, got a piece of"
                f" {getattr(weight, 'label', type(weight).__name__)}: trainers that shard weights"
                " by themselves, as Megatron-FSDP does, need them in high precision. Make the model"
                " without quantized_model_init (fp8_model_init), or use torch's fully_shard"
            )
    pieces = [*zip(model_weights, master_weights, start_offsets, strict=True)]
    for weight, master, start in pieces:
        _check(weight, master, start)
    if not pieces:
        return
    own = [_largest(weight, master, start or 0) for weight, master, start in pieces]
    amaxes = torch.cat(own)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
    of_all = amaxes.split([each.numel() for each in own])
    for (weight, master, start), largest in zip(pieces, of_all, strict=True):
        write = _write_blocks if isinstance(weight, Float8BlockwiseQTensor) else _write
        write(weight, master, start or 0, largest)


cast_master_weights_to_fp8 = quantize_master_weights


def post_all_gather_processing(model_weights: Sequence[Any]) -> None:
    """Drop or remake the transposed codes of weights, whose codes a gather has replaced."""
    for weight in model_weights:
        if isinstance(weight, Float8Tensor):
            weight.update_usage(columnwise_usage=False)  # made again on demand
        elif isinstance(weight, Float8BlockwiseQTensor) and weight._is_2D_scaled:
            _transpose_again(weight)


def _check(weight: Any, master: torch.Tensor | None, start: int | None) -> None:
    squares = isinstance(weight, Float8BlockwiseQTensor) and weight._is_2D_scaled
    if not isinstance(weight, Float8Tensor) and not squares:
        blocks = " of 1 x 128 blocks" if isinstance(weight, Float8BlockwiseQTensor) else ""
        raise TypeError(
            "[quantize_master_weights] expected weights of one scale (Float8Tensor) or of square"
            f" blocks (Float8BlockwiseQTensor), got {type(weight).__name__}{blocks}"
        )
    if master is not None and not 0 <= (start or 0) <= weight.numel() - master.numel():
        raise ValueError(
            f"[quantize_master_weights] expected a piece of {weight.numel()} values"
            f" ({weight.label}), got {master.numel()} from {start} on"
        )


def _largest(weight: Any, master: torch.Tensor | None, start: int) -> torch.Tensor:
    """fp32: the amax of a piece, or the amax of the piece's values in each block of the weight."""
    if not isinstance(weight, Float8BlockwiseQTensor):
        zero = torch.zeros(1, dtype=torch.float32, device=weight.device)
        return zero if master is None else amax(_row(master))
    values = torch.zeros(matrix_shape(weight.shape), dtype=torch.float32, device=weight.device)
    if master is not None:
        _piece(values, master, start).copy_(master.detach().flatten())
    layout = block_layout(2)
    return largest_of_blocks(values, layout.scale_shape(*values.shape), layout.run).flatten()


def _write(
    weight: Float8Tensor, master: torch.Tensor | None, start: int, largest: torch.Tensor
) -> None:
    """Set the scale of a weight, and the codes of a piece."""
    scales = _scales(weight, largest)
    own = weight._scale_inv  # of any shape, with one element or two
    own.copy_(scales[: own.numel()].view_as(own))
    weight.update_usage(columnwise_usage=False)
    if master is None or not master.numel():
        return
    codes = quantize(_row(master), weight._format, None, None, scales, True, False, None)[0]
    assert codes is not None
    _piece(weight._data, master, start).copy_(codes.view(-1))


def _write_blocks(
    weight: Float8BlockwiseQTensor,
    master: torch.Tensor | None,
    start: int,
    largest: torch.Tensor,
) -> None:
    """Set the scales of all blocks of a weight, and the codes of a piece.

    The whole weight is cast. Values of other pieces are replaced by the amax of their block, so
    that the cast finds the scales of all blocks.
    """
    rows, cols = matrix_shape(weight.shape)
    layout = block_layout(2)
    values = layout.spread(largest.view(layout.scale_shape(rows, cols)), rows, cols).contiguous()
    if master is not None:
        _piece(values, master, start).copy_(master.detach().flatten())
    quantizer: Any = weight._quantizer
    if quantizer is None:
        quantizer = Float8BlockQuantizer(weight._fp8_dtype, rowwise=True, columnwise=False)
    made: Any = quantizer.operands(values, OperandRequest(quantizer, True, False)).rowwise
    had = weight.get_usages()["columnwise"]
    weight.update_usage(rowwise_usage=True, columnwise_usage=False)
    assert weight._rowwise_data is not None and weight._rowwise_scale_inv is not None
    weight._rowwise_scale_inv.copy_(made.scales)
    if master is not None:
        _piece(weight._rowwise_data, master, start).copy_(_piece(made.codes, master, start))
    weight.update_usage(columnwise_usage=had)


def _transpose_again(weight: Float8BlockwiseQTensor) -> None:
    usages = weight.get_usages()
    if all(usages.values()):
        weight.update_usage(columnwise_usage=False)
        weight.update_usage(columnwise_usage=True)


def _piece(whole: torch.Tensor, master: torch.Tensor, start: int) -> torch.Tensor:
    """The view of a flattened weight that holds a piece of a master weight."""
    return whole.view(-1)[start : start + master.numel()]


def _scales(weight: Float8Tensor, largest: torch.Tensor) -> torch.Tensor:
    """The scales {1/scale, scale} with which a weight of this amax is cast."""
    quantizer: Any = weight._quantizer
    if isinstance(quantizer, Float8Quantizer):  # with delayed scaling the scale is given
        if quantizer.amax is not None:
            quantizer.amax.copy_(torch.maximum(quantizer.amax, largest))
        scale = quantizer.scale.detach().float().reshape(1)
        return torch.cat([scale.reciprocal(), scale])
    if getattr(quantizer, "writes_weights", False):
        return quantizer.scales_of([largest.clone()])[0]
    power_of_2, epsilon = (getattr(quantizer, n, 0) for n in ("power_of_2", "epsilon"))
    return current_scales(largest.clone(), weight._format, bool(power_of_2), float(epsilon))


def _row(master: torch.Tensor) -> torch.Tensor:
    return master.detach().reshape(1, -1).contiguous()
