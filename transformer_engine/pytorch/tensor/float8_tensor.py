"""`Float8Tensor`: FP8 codes with one scale, and the public quantizers that make it."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.dtypes import FP8_NAMES, DType
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.kernels.transpose import transpose
from transformer_engine.pytorch.operands import Demand, Fp8Matrix, Operands
from transformer_engine.pytorch.quantizers import CurrentQuantizer, DelayedQuantizer, Fp8Quantizer
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor

aten = torch.ops.aten


class Float8Tensor(QuantizedTensor):
    """FP8 codes under a nominal dtype.

    Args:
        shape: of the tensor.
        dtype: nominal dtype, what `dequantize` gives by default.
        data: uint8 codes of that shape.
        fp8_scale_inv: fp32, element 0 = 1 / scale.
        fp8_dtype: `DType.kFloat8E4M3` or `DType.kFloat8E5M2`.
        data_transpose: uint8 codes `[cols, rows]`, made on demand where None.
        quantizer: quantises anew what is written in place.

    >>> import torch
    >>> quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3)
    >>> q = quantizer(torch.tensor([[1.0, 448.0]]))
    >>> q.dequantize()
    tensor([[  1., 448.]])
    """

    _data: torch.Tensor
    _scale_inv: torch.Tensor
    _transpose: torch.Tensor | None
    _fp8_dtype: DType
    _quantizer: Fp8Quantizer | None

    def __new__(
        cls,
        shape: torch.Size,
        dtype: torch.dtype,
        data: torch.Tensor,
        fp8_scale_inv: torch.Tensor,
        fp8_dtype: DType | int,
        data_transpose: torch.Tensor | None = None,
        quantizer: Fp8Quantizer | None = None,
    ) -> Float8Tensor:
        """Wrap codes."""
        self = cls.wrap(torch.Size(shape), dtype, data)
        self._data = data
        self._scale_inv = fp8_scale_inv
        self._fp8_dtype = DType(fp8_dtype)
        self._transpose = data_transpose
        self._quantizer = quantizer
        return self

    @classmethod
    def from_operands(
        cls, operands: Operands, like: torch.Tensor, quantizer: Fp8Quantizer
    ) -> Float8Tensor:
        """The tensor form of what a quantizer gives to GEMMs."""
        rowwise, columnwise = operands.rowwise, operands.columnwise
        assert isinstance(rowwise, Fp8Matrix)
        transposed = columnwise.codes if isinstance(columnwise, Fp8Matrix) else None
        codes = rowwise.codes.view(like.shape)
        return cls(
            like.shape, like.dtype, codes, rowwise.scales, rowwise.format, transposed, quantizer
        )

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor of `dtype` (the nominal one where None)."""
        codes = self._data.contiguous()
        return dequantize(codes, int(self._fp8_dtype), self._scale_inv, dtype or self.dtype)

    def quantize_(self, tensor: torch.Tensor) -> Float8Tensor:
        """Quantise other values into this tensor; its transpose is dropped.

        Raises:
            RuntimeError: the tensor was made without a quantizer.
        """
        if self._quantizer is None:
            raise RuntimeError(
                "[Float8Tensor] expected a quantizer to write with, got a tensor made without one"
            )
        plain = tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor
        plain = plain.to(self.device).contiguous()
        rowwise = self._quantizer.operands(plain, Demand(self._quantizer, True, False)).rowwise
        assert isinstance(rowwise, Fp8Matrix)
        self._data.copy_(rowwise.codes.view(self._data.shape))
        self._scale_inv.copy_(rowwise.scales[: self._scale_inv.numel()])
        self._transpose = None
        return self

    def transposed_codes(self) -> torch.Tensor:
        """Codes `[cols, rows]`, made once and kept until the values change."""
        if self._transpose is None:
            self._transpose = transpose(self._data.contiguous())
        return self._transpose

    def with_codes(
        self, data: torch.Tensor, scale_inv: torch.Tensor, transposed: torch.Tensor | None = None
    ) -> Float8Tensor:
        """The same kind of tensor around other codes."""
        return Float8Tensor(
            data.shape, self.dtype, data, scale_inv, self._fp8_dtype, transposed, self._quantizer
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"Float8Tensor(fp8_dtype={FP8_NAMES[int(self._fp8_dtype)]}, "
            f"scale_inv={self._scale_inv.flatten()[0].item()}, data={self.dequantize()})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """The plain tensors inside, and the rest (for torch.compile)."""
        return ["_data", "_scale_inv"], {
            "dtype": self.dtype,
            "fp8_dtype": self._fp8_dtype,
            "quantizer": self._quantizer,
        }

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: dict[str, Any], size: Any, stride: Any
    ) -> Float8Tensor:
        """The inverse of `__tensor_flatten__`."""
        return Float8Tensor(
            size,
            context["dtype"],
            inner["_data"],
            inner["_scale_inv"],
            context["fp8_dtype"],
            quantizer=context["quantizer"],
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        parts = (self.shape, self.dtype, self._data, self._scale_inv, int(self._fp8_dtype))
        return _rebuild, parts


def _rebuild(
    shape: torch.Size,
    dtype: torch.dtype,
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    fp8_dtype: int,
) -> Float8Tensor:
    """What `torch.save` writes: codes and scale; the quantizer stays behind."""
    return Float8Tensor(shape, dtype, data, scale_inv, fp8_dtype)


torch.serialization.add_safe_globals([_rebuild])


def _detach(x: Float8Tensor) -> Float8Tensor:
    return x.with_codes(x._data, x._scale_inv, x._transpose)


def _clone(x: Float8Tensor, **kwargs: Any) -> Float8Tensor:
    transposed = None if x._transpose is None else x._transpose.clone()
    return x.with_codes(x._data.clone(**kwargs), x._scale_inv.clone(), transposed)


def _view(x: Float8Tensor, shape: Any) -> Float8Tensor:
    data = x._data.view(shape)
    keep = data.ndim > 0 and x.ndim > 0 and data.shape[-1] == x.shape[-1]
    return x.with_codes(data, x._scale_inv, x._transpose if keep else None)


def _to_copy(
    x: Float8Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **layout: Any,  # codes stay contiguous whatever is asked
) -> Any:
    to = device or x.device
    if dtype not in (None, x.dtype):
        return x.dequantize(dtype=dtype).to(to, non_blocking=non_blocking)
    transposed = None if x._transpose is None else x._transpose.to(to, non_blocking=non_blocking)
    data = x._data.to(to, non_blocking=non_blocking)
    return x.with_codes(data, x._scale_inv.to(to, non_blocking=non_blocking), transposed)


def _copy_into(target: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(target, Float8Tensor):
        return target.copy_(source.dequantize(dtype=target.dtype), *args, **kwargs)
    same = isinstance(source, Float8Tensor) and source._fp8_dtype is target._fp8_dtype
    if not same or source.shape != target.shape:
        expanded = source.dequantize() if isinstance(source, QuantizedTensor) else source
        return target.quantize_(expanded.expand(target.shape).to(target.dtype))
    target._data.copy_(source._data)
    target._scale_inv.copy_(source._scale_inv)
    target._transpose = None
    return target


Float8Tensor.handlers = {
    aten.detach.default: _detach,
    aten.clone.default: _clone,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_into,
}


class _TensorMaking:
    """What public quantizers add: calling one gives a `Float8Tensor`."""

    rowwise_usage = True
    columnwise_usage = True

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Choose whether codes and transposed codes are made."""
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def quantize(self, tensor: torch.Tensor, *, out: Float8Tensor | None = None) -> Float8Tensor:
        """Quantise.

        Args:
            tensor: fp32, fp16 or bf16.
            out: tensor to write into instead of a new one.
        """
        if out is not None:
            return out.quantize_(tensor)
        plain = tensor.detach().contiguous()
        operands = self.operands(plain, Demand(self, True, self.columnwise_usage))  # type: ignore[attr-defined]
        return Float8Tensor.from_operands(operands, plain, self)  # type: ignore[arg-type]

    def __call__(self, tensor: torch.Tensor) -> Float8Tensor:
        return self.quantize(tensor)


class Float8Quantizer(_TensorMaking, DelayedQuantizer):
    """Quantises with a given scale and notes the amax.

    Args:
        scale: fp32 `[1]`.
        amax: fp32 `[1]`, raised to `max |x|`.
        fp8_dtype: `DType.kFloat8E4M3` or `DType.kFloat8E5M2`.
        rowwise: make codes.
        columnwise: make transposed codes.
    """

    def __init__(
        self,
        scale: torch.Tensor,
        amax: torch.Tensor,
        fp8_dtype: DType | int,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(scale, amax, int(fp8_dtype))
        self.dtype = DType(fp8_dtype)
        self.set_usage(rowwise=rowwise, columnwise=columnwise)


class Float8CurrentScalingQuantizer(_TensorMaking, CurrentQuantizer):
    """Quantises with the scale of the tensor in hand.

    Args:
        fp8_dtype: `DType.kFloat8E4M3` or `DType.kFloat8E5M2`.
        device: accepted for older callers; results lie where the input does.
        rowwise: make codes.
        columnwise: make transposed codes.
        force_pow_2_scales: round scales down to powers of two.
        amax_epsilon: least amax.
    """

    def __init__(
        self,
        fp8_dtype: DType | int,
        device: torch.device | str | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
    ) -> None:
        super().__init__(int(fp8_dtype), force_pow_2_scales, amax_epsilon)
        self.dtype = DType(fp8_dtype)
        self.set_usage(rowwise=rowwise, columnwise=columnwise)
