"""`Float8Tensor`: FP8 codes with one scale, and the public quantizers that make it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch.dtypes import FP8_NAMES, HIGH_PRECISION, DType
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.kernels.transpose import transpose
from transformer_engine.pytorch.operands import Demand, Fp8Matrix, Operands, scale_pair
from transformer_engine.pytorch.quantizers import CurrentQuantizer, DelayedQuantizer, Fp8Quantizer
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor, TensorMaking


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

    As a parameter it is the only copy of a weight (see `quantized_model_init`).

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
        self._transpose_version = _version(data)
        self._quantizer = quantizer
        return self

    @property
    def label(self) -> str:
        """What the tensor is, for messages."""
        return getattr(self._quantizer, "label", "") or super().label

    @property
    def data(self) -> torch.Tensor:
        """The same codes without autograd. Setting it replaces the values, or takes over codes."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
            raise ValueError(
                f"[Float8Tensor] expected data of shape {tuple(self.shape)}, {self.dtype} on "
                f"{self.device}, got {tuple(value.shape)}, {value.dtype} on {value.device} "
                f"({self.label}); move or convert the module instead"
            )
        if isinstance(value, Float8Tensor) and value._fp8_dtype is self._fp8_dtype:
            self._data, self._scale_inv = value._data, value.scale_pair()
            self._transpose = None
        else:
            self.quantize_(value)

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
        to = dtype or self.dtype
        if self.is_meta:
            return torch.empty(self.shape, dtype=to, device=self.device)
        by_kernel = to if to in HIGH_PRECISION else torch.float32
        codes = self._data.contiguous()
        return dequantize(codes, int(self._fp8_dtype), self._scale_inv, by_kernel).to(to)

    def quantize_(self, tensor: torch.Tensor) -> Float8Tensor:
        """Quantise other values into this tensor; its transpose is dropped.

        Raises:
            RuntimeError: the tensor was made without a quantizer.
            ValueError: the values have another shape.
        """
        if self._quantizer is None:
            raise RuntimeError(
                "[Float8Tensor] expected a quantizer to write with, got a tensor made without one"
            )
        if tensor.shape != self.shape:
            raise ValueError(
                f"[Float8Tensor] expected values of shape {tuple(self.shape)}, got "
                f"{tuple(tensor.shape)} ({self.label})"
            )
        if self.is_meta:
            return self
        plain = tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor.detach()
        plain = plain.to(self.device, plain.dtype if plain.dtype in HIGH_PRECISION else self.dtype)
        plain = plain.contiguous()
        rowwise = self._quantizer.operands(plain, Demand(self._quantizer, True, False)).rowwise
        assert isinstance(rowwise, Fp8Matrix)
        return self.overwrite(rowwise.codes.view(self._data.shape), rowwise.scales)

    def overwrite(self, codes: torch.Tensor, scale_inv: torch.Tensor) -> Float8Tensor:
        """Take over the contents of other codes and of their scale."""
        self._data.copy_(codes)
        self._scale_inv.copy_(scale_inv[: self._scale_inv.numel()])
        self._transpose = None
        if not self._data.is_inference():
            # Below autograd nothing else tells aliases, and graphs that have saved the codes.
            torch.autograd.graph.increment_version(self._data)
        return self

    def scale_pair(self) -> torch.Tensor:
        """fp32 `[2]` = {1/scale, scale}; users may bring the first alone."""
        return scale_pair(self._scale_inv)

    @property
    def known_transpose(self) -> torch.Tensor | None:
        """The transposed codes, where they are at hand and no alias has written the codes since."""
        current = self._transpose_version == _version(self._data)
        return self._transpose if current else None

    def transposed_codes(self) -> torch.Tensor:
        """Codes `[cols, rows]`, made once and kept until the values change."""
        if self.known_transpose is None:
            self._transpose = transpose(self._data.contiguous())
            self._transpose_version = _version(self._data)
        return self._transpose  # type: ignore[return-value]

    def with_codes(
        self, data: torch.Tensor, scale_inv: torch.Tensor, transposed: torch.Tensor | None = None
    ) -> Float8Tensor:
        """The same kind of tensor around other codes."""
        return Float8Tensor(
            data.shape, self.dtype, data, scale_inv, self._fp8_dtype, transposed, self._quantizer
        )

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Float8Tensor:
        """The same kind of tensor, around what a function makes of codes and scale."""
        known = self.known_transpose
        transposed = None if known is None else function(known)
        return self.with_codes(function(self._data), function(self._scale_inv), transposed)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self.is_meta or type(self._data) is not torch.Tensor:  # there is nothing to show
            return f"Float8Tensor(size={tuple(self.shape)}, dtype={self.dtype}, data={self._data})"
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

    @classmethod
    def __metadata_guard__(cls, known: dict[str, Any], found: dict[str, Any]) -> bool:
        """Whether a graph compiled for one tensor serves another (quantizers differ by label)."""
        return all(known[name] == found[name] for name in ("dtype", "fp8_dtype"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8Tensor:
        if id(self) not in memo:
            copy = self.with_codes(self._data.clone(), self._scale_inv.clone())
            if isinstance(self, nn.Parameter):
                copy = nn.Parameter(copy)  # type: ignore[assignment]
            own = {k: v for k, v in vars(self).items() if k not in vars(copy)}
            vars(copy).update({k: deepcopy(v, memo) for k, v in own.items()})
            memo[id(self)] = copy.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        parts = (self.shape, self.dtype, self._data, self._scale_inv, int(self._fp8_dtype))
        pickled = getattr(self._quantizer, "pickled", None)
        return (_rebuild, parts) if pickled is None else pickled(self, parts)


def _version(codes: torch.Tensor) -> int:
    """Raised whenever the codes are written, through whichever alias."""
    return 0 if codes.is_inference() else codes._version


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


class _Float8Making(TensorMaking):
    """What public quantizers add: calling one gives a `Float8Tensor`."""

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


class Float8Quantizer(_Float8Making, DelayedQuantizer):
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


class Float8CurrentScalingQuantizer(_Float8Making, CurrentQuantizer):
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
