"""`Float8BlockwiseQTensor`: FP8 codes whose blocks have scales, and the quantizer that makes it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from transformer_engine.pytorch.dtypes import FP8_NAMES, SCALE_BLOCK, DType, block_format
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.kernels.quantize_blocks import block_scale_shape
from transformer_engine.pytorch.operands import Demand, Fp8Matrix, Side
from transformer_engine.pytorch.quantizers import BlockQuantizer
from transformer_engine.pytorch.tensor.quantized_tensor import (
    QuantizedTensor,
    TensorMaking,
    to_copy,
)

aten = torch.ops.aten

Parts = tuple[torch.Tensor | None, ...]


class Float8BlockwiseQTensor(QuantizedTensor):
    """FP8 codes under a nominal dtype, with an inverse scale for every block.

    The tensor is read as `[rows, cols]`, cols being the last size. Of the two sides one may be
    missing. In 1 x 128 blocks they are scaled on their own, so their values differ; `dequantize`
    gives those of the row-wise side where it is there.

    Args:
        shape: of the tensor.
        dtype: nominal dtype, what `dequantize` gives by default.
        rowwise_data: uint8 codes of that shape, or None.
        rowwise_scale_inv: fp32, see `kernels.quantize_blocks.block_scale_shape`.
        columnwise_data: uint8 codes `[cols, rows]`, or None.
        columnwise_scale_inv: fp32, the inverse scales of these.
        fp8_dtype: `DType.kFloat8E4M3` or `DType.kFloat8E5M2`.
        is_2D_scaled: blocks are of 128 x 128 values, not 1 x 128.
        quantizer: quantises anew what is written in place.

    Raises:
        ValueError: both sides are missing.

    >>> import torch
    >>> quantizer = Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False)
    >>> quantizer(torch.tensor([[1.0, 448.0]])).dequantize()
    tensor([[  1., 448.]])
    """

    _rowwise_data: torch.Tensor | None
    _rowwise_scale_inv: torch.Tensor | None
    _columnwise_data: torch.Tensor | None
    _columnwise_scale_inv: torch.Tensor | None
    _fp8_dtype: DType
    _is_2D_scaled: bool
    _quantizer: Float8BlockQuantizer | None

    def __new__(
        cls,
        shape: torch.Size,
        dtype: torch.dtype,
        *,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        fp8_dtype: DType | int,
        is_2D_scaled: bool,
        quantizer: Float8BlockQuantizer | None = None,
    ) -> Float8BlockwiseQTensor:
        """Wrap codes."""
        some = rowwise_data if rowwise_data is not None else columnwise_data
        if some is None:
            raise ValueError(
                "[Float8BlockwiseQTensor] expected row-wise or column-wise data, got neither"
            )
        self = cls.wrap(torch.Size(shape), dtype, some)
        self._rowwise_data, self._rowwise_scale_inv = rowwise_data, rowwise_scale_inv
        self._columnwise_data, self._columnwise_scale_inv = columnwise_data, columnwise_scale_inv
        self._fp8_dtype = DType(fp8_dtype)
        self._is_2D_scaled = is_2D_scaled
        self._quantizer = quantizer
        return self

    @property
    def matrix_format(self) -> int:
        """The format of both sides, for kernels."""
        return block_format(int(self._fp8_dtype), 2 if self._is_2D_scaled else 1)

    @property
    def parts(self) -> Parts:
        """Codes and inverse scales, row-wise and column-wise."""
        return (
            self._rowwise_data,
            self._rowwise_scale_inv,
            self._columnwise_data,
            self._columnwise_scale_inv,
        )

    def with_parts(self, parts: Sequence[torch.Tensor | None], shape: torch.Size) -> Any:
        """The same kind of tensor around other codes."""
        return Float8BlockwiseQTensor(
            shape,
            self.dtype,
            **_named(tuple(parts)),
            fp8_dtype=self._fp8_dtype,
            is_2D_scaled=self._is_2D_scaled,
            quantizer=self._quantizer,
        )

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """The same kind of tensor, around what a function makes of codes and scales."""
        return self.with_parts(
            [None if part is None else function(part) for part in self.parts], self.shape
        )

    def side(self, columnwise: bool) -> Fp8Matrix | None:
        """What GEMMs take; None where that side is missing."""
        codes, scales = self.parts[2:] if columnwise else self.parts[:2]
        if codes is None or scales is None:
            return None
        return Fp8Matrix(codes, scales, self.matrix_format)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor of `dtype` (the nominal one where None)."""
        side, to = self.side(False) or self.side(True), dtype or self.dtype
        assert side is not None
        values = dequantize(side.codes.contiguous(), side.format, side.scales, to)
        return values if self._rowwise_data is not None else values.t().reshape(self.shape)

    def quantize_(self, tensor: torch.Tensor) -> Float8BlockwiseQTensor:
        """Quantise other values into the sides of this tensor.

        Raises:
            RuntimeError: the tensor was made without a quantizer.
        """
        if self._quantizer is None:
            raise RuntimeError(
                "[Float8BlockwiseQTensor] expected a quantizer to write with, got a tensor made "
                "without one"
            )
        plain = tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor
        plain = plain.to(self.device).contiguous()
        sides = (self._rowwise_data is not None, self._columnwise_data is not None)
        made = self._quantizer.operands(plain, Demand(self._quantizer, *sides))
        for own, new in zip(self.parts, _parts(made.rowwise, made.columnwise), strict=True):
            if own is not None and new is not None:
                own.copy_(new.view(own.shape))
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"Float8BlockwiseQTensor(fp8_dtype={FP8_NAMES[int(self._fp8_dtype)]}, "
            f"is_2D_scaled={self._is_2D_scaled}, data={self.dequantize()})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """The plain tensors inside, and the rest (for torch.compile)."""
        names = [name for name, part in zip(_PARTS, self.parts, strict=True) if part is not None]
        return names, {
            "dtype": self.dtype,
            "fp8_dtype": self._fp8_dtype,
            "is_2D_scaled": self._is_2D_scaled,
            "quantizer": self._quantizer,
        }

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: dict[str, Any], size: Any, stride: Any
    ) -> Float8BlockwiseQTensor:
        """The inverse of `__tensor_flatten__`."""
        parts: dict[str, Any] = {name.removeprefix("_"): inner.get(name) for name in _PARTS}
        return Float8BlockwiseQTensor(size, **parts, **context)

    def __reduce_ex__(self, protocol: Any) -> Any:
        rest = int(self._fp8_dtype), self._is_2D_scaled
        return _rebuild, (self.shape, self.dtype, self.parts, *rest)


_PARTS = (
    "_rowwise_data",
    "_rowwise_scale_inv",
    "_columnwise_data",
    "_columnwise_scale_inv",
)


def _parts(rowwise: Side | None, columnwise: Side | None) -> Parts:
    found: list[torch.Tensor | None] = []
    for side in (rowwise, columnwise):
        there = isinstance(side, Fp8Matrix)
        found += [side.codes, side.scales] if there else [None, None]  # type: ignore[union-attr]
    return tuple(found)


def _named(parts: Parts) -> dict[str, Any]:
    """The parts as arguments of `Float8BlockwiseQTensor`."""
    return {name.removeprefix("_"): part for name, part in zip(_PARTS, parts, strict=True)}


def _rebuild(
    shape: torch.Size, dtype: torch.dtype, parts: Parts, fp8_dtype: int, is_2D_scaled: bool
) -> Float8BlockwiseQTensor:
    """What `torch.save` writes: codes and scales; the quantizer stays behind."""
    return Float8BlockwiseQTensor(
        shape, dtype, **_named(parts), fp8_dtype=fp8_dtype, is_2D_scaled=is_2D_scaled
    )


torch.serialization.add_safe_globals([_rebuild])


def _view(x: Float8BlockwiseQTensor, shape: Any) -> Any:
    plain = torch.empty(x.shape, device="meta").view(shape)
    if plain.ndim == 0 or x.ndim == 0 or plain.shape[-1] != x.shape[-1]:
        warnings.warn(
            f"[Float8BlockwiseQTensor] expected a view with the last size {tuple(x.shape)[-1:]} "
            f"kept, got {tuple(plain.shape)}, which cuts blocks: it is dequantised",
            stacklevel=2,
        )
        return x.dequantize().view(shape)
    rowwise, *others = x.parts
    return x.with_parts(
        [None if rowwise is None else rowwise.view(plain.shape), *others], plain.shape
    )


def _copy_into(target: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(target, Float8BlockwiseQTensor):
        return target.copy_(source.dequantize(dtype=target.dtype), *args, **kwargs)
    if not _same_kind(target, source):
        values = source.dequantize() if isinstance(source, QuantizedTensor) else source
        return target.quantize_(values.expand(target.shape).to(target.dtype))
    for own, other in zip(target.parts, source.parts, strict=True):
        if own is not None:
            own.copy_(other)
    return target


def _same_kind(target: Float8BlockwiseQTensor, source: Any) -> bool:
    return (
        isinstance(source, Float8BlockwiseQTensor)
        and source.matrix_format == target.matrix_format
        and source.shape == target.shape
        and all(
            own is None or other is not None
            for own, other in zip(target.parts, source.parts, strict=True)
        )
    )


Float8BlockwiseQTensor.handlers = {
    aten.detach.default: lambda x: x.mapped(lambda part: part),
    aten.clone.default: lambda x, **layout: x.mapped(torch.clone),
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten._to_copy.default: to_copy,
    aten.copy_.default: _copy_into,
}


class Float8BlockQuantizer(TensorMaking, BlockQuantizer):
    """Quantises blocks with the scales of the tensor in hand; calling it gives a tensor.

    Args:
        fp8_dtype: `DType.kFloat8E4M3` or `DType.kFloat8E5M2`.
        rowwise: make codes.
        columnwise: make transposed codes.
        amax_epsilon: least amax.
        force_pow_2_scales: round scales down to powers of two.
        block_scaling_dim: 1 for 1 x 128, 2 for 128 x 128 values.
    """

    def __init__(
        self,
        fp8_dtype: DType | int,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(int(fp8_dtype), block_scaling_dim, force_pow_2_scales, amax_epsilon)
        self.dtype = DType(fp8_dtype)
        self.set_usage(rowwise=rowwise, columnwise=columnwise)

    @property
    def block_scaling_dim(self) -> int:
        """1 or 2."""
        return self.dimensions

    def get_columnwise_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Of the transposed codes: `(cols, rows)`."""
        rows, cols = _matrix_shape(shape)
        return cols, rows

    def get_scale_shape(self, shape: Sequence[int], columnwise: bool) -> tuple[int, int]:
        """Of the inverse scales of a tensor's side."""
        rows, cols = _matrix_shape(shape)
        sides = (cols, rows) if columnwise else (rows, cols)
        return block_scale_shape(*sides, self.dimensions)

    def is_quantizable(self, tensor: torch.Tensor) -> bool:
        """Whether parts of the tensor, cut along tokens, are made of whole blocks."""
        rows, cols = _matrix_shape(tensor.shape)
        return tensor.ndim >= 2 and rows % SCALE_BLOCK == 0 and cols % SCALE_BLOCK == 0

    def quantize(
        self, tensor: torch.Tensor, *, out: Float8BlockwiseQTensor | None = None
    ) -> Float8BlockwiseQTensor:
        """Quantise.

        Args:
            tensor: fp32, fp16 or bf16.
            out: tensor to write into instead of a new one.
        """
        if out is not None:
            return out.quantize_(tensor)
        plain = tensor.detach().contiguous()
        made = self.operands(plain, Demand(self, self.rowwise_usage, self.columnwise_usage))
        return Float8BlockwiseQTensor(
            plain.shape,
            plain.dtype,
            **_named(_parts(made.rowwise, made.columnwise)),
            fp8_dtype=self.dtype,
            is_2D_scaled=self.dimensions == 2,
            quantizer=self,
        )


def _matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    size = torch.Size(shape)
    return size[:-1].numel(), size[-1]
