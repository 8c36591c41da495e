"""The operations of torch that quantised tensors run on their codes, without dequantising.

`QuantizedTensor.handlers` maps each of them to a function; all other operations run on values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch.tensor import shards
from transformer_engine.pytorch.tensor.quantized_tensor import Handler, QuantizedTensor
from transformer_engine.pytorch.tensor.writing import alone, ranks_of

aten = torch.ops.aten


def _to_copy(
    x: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **layout: Any,  # codes stay contiguous whatever is asked
) -> Any:
    """Move codes to another device; convert to another dtype by dequantising."""
    to = device or x.device
    if dtype not in (None, x.dtype):
        return x.plain_values(dtype).to(to, non_blocking=non_blocking)
    return x.mapped(lambda part: part.to(to, non_blocking=non_blocking, copy=True))


def _copy_into(target: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(target, QuantizedTensor):
        return target.copy_(source.plain_values(target.dtype), *args, **kwargs)
    if target.like(source):
        ranks, others = ranks_of(target), ranks_of(source)
        if ranks is not None and others is not None:
            ranks.initial = others.initial
        return target.overwrite(source.parts)
    values = source.plain_values() if isinstance(source, QuantizedTensor) else source
    return target.quantize_(values.expand(target.shape))


def _shaped_like(func: Any) -> Handler:
    """A handler for a factory, which reads only shape, dtype and device of its argument."""

    def handler(x: QuantizedTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs["dtype"] = kwargs.get("dtype") or x.dtype
        return func(torch.empty(x.shape, dtype=torch.uint8, device=x.device), *args, **kwargs)

    return handler


def _new_zeros(x: QuantizedTensor, size: Sequence[int], **options: Any) -> Any:
    room = shards.room_for(x, size, options)
    return _shaped_like(aten.new_zeros.default)(x, size, **options) if room is None else room


def _refused(x: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    raise TypeError(
        f"[{type(x).__name__}] {x.label} holds FP8 codes: its storage and dtype are not open"
    )


_REFUSED = (
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
    aten.set_.default,
    aten.view.dtype,
)
_FACTORIES = (
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_empty.default,
    aten.new_ones.default,
    aten.new_full.default,
)

QuantizedTensor.handlers = {
    aten.detach.default: shards.alias_of,
    aten.clone.default: lambda x, **layout: alone(x),
    aten.view.default: lambda x, shape: x.viewed(shape),
    aten._unsafe_view.default: lambda x, shape: x.viewed(shape),
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_into,
    **{func: _shaped_like(func) for func in _FACTORIES},
    aten.new_zeros.default: _new_zeros,
    **shards.HANDLERS,
    **dict.fromkeys(_REFUSED, _refused),
}
