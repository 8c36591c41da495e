"""What `Float8Tensor` does on its codes, without dequantising."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
from transformer_engine.pytorch.tensor.quantized_tensor import Handler, QuantizedTensor, to_copy

aten = torch.ops.aten


def _detach(x: Float8Tensor) -> Float8Tensor:
    return x.with_codes(x._data, x._scale_inv, x.known_transpose)


def _clone(x: Float8Tensor, **kwargs: Any) -> Float8Tensor:
    known = x.known_transpose
    transposed = None if known is None else known.clone()
    return x.with_codes(x._data.clone(**kwargs), x._scale_inv.clone(), transposed)


def _view(x: Float8Tensor, shape: Any) -> Float8Tensor:
    data = x._data.view(shape)
    keep = data.ndim > 0 and x.ndim > 0 and data.shape[-1] == x.shape[-1]
    return x.with_codes(data, x._scale_inv, x.known_transpose if keep else None)


def _copy_into(target: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(target, Float8Tensor):
        return target.copy_(source.dequantize(dtype=target.dtype), *args, **kwargs)
    same = isinstance(source, Float8Tensor) and source._fp8_dtype is target._fp8_dtype
    if not same or source.shape != target.shape:
        values = source.dequantize() if isinstance(source, QuantizedTensor) else source
        return target.quantize_(values.expand(target.shape))
    return target.overwrite(source._data, source._scale_inv)


def _shaped_like(func: Any) -> Handler:
    """A factory that takes from its argument nothing but shape, strides, dtype and device."""

    def handler(x: Float8Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs["dtype"] = kwargs.get("dtype") or x.dtype
        return func(x._data, *args, **kwargs)

    return handler


def _refused(x: Float8Tensor, *args: Any, **kwargs: Any) -> Any:
    raise TypeError(f"[Float8Tensor] {x.label} holds FP8 codes: its storage and dtype are not open")


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
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
)

Float8Tensor.handlers = {
    aten.detach.default: _detach,
    aten.clone.default: _clone,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten._to_copy.default: to_copy,
    aten.copy_.default: _copy_into,
    **{func: _shaped_like(func) for func in _FACTORIES},
    **dict.fromkeys(_REFUSED, _refused),
}
