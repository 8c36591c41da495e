"""`Float8Tensor`: FP8 codes with one scale, and the public quantizers that make it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.pytorch.capture import is_capturing
from transformer_engine.pytorch.dtypes import FP8_NAMES, DType
from transformer_engine.pytorch.fp8.casts.operands import (
    Fp8Matrix,
    FusedArguments,
    OperandRequest,
    Operands,
    scale_pair,
)
from transformer_engine.pytorch.fp8.casts.quantizers import Quantizer
from transformer_engine.pytorch.fp8.recipes.current import CurrentQuantizer
from transformer_engine.pytorch.fp8.recipes.delayed import DelayedQuantizer
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.kernels.transpose import transpose
from transformer_engine.pytorch.parallel.groups import check_group
from transformer_engine.pytorch.tensor.making import FindsScales, TensorMaking
from transformer_engine.pytorch.tensor.quantized_tensor import Parts
from transformer_engine.pytorch.tensor.shards import ShardableTensor


class Float8Tensor(ShardableTensor):
    """FP8 codes under a nominal dtype.

    Args:
        shape: the shape of the tensor.
        dtype: nominal dtype, which `dequantize` returns by default.
        data: uint8 codes of that shape.
        fp8_scale_inv: fp32, element 0 = 1 / scale.
        fp8_dtype: `DType.kFloat8E4M3` or `DType.kFloat8E5M2`, or torch's dtype of that name.
        requires_grad: autograd records operations on it.
        data_transpose: uint8 codes `[cols, rows]`; where None, they are made when first needed.
        quantizer: quantises values that are written in place.

    As a parameter it is the only copy of a weight (see `quantized_model_init`).

    >>> import torch
    >>> quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3)
    >>> q = quantizer(torch.tensor([[1.0, 448.0]]))
    >>> q.dequantize()
    tensor([[  1., 448.]])
    """

    part_names = ("_data", "_scale_inv")

    _data: torch.Tensor
    _scale_inv: torch.Tensor
    _transpose: torch.Tensor | None

    def __new__(
        cls,
        shape: torch.Size,
        dtype: torch.dtype,
        data: torch.Tensor,
        fp8_scale_inv: torch.Tensor,
        fp8_dtype: DType | torch.dtype | int,
        requires_grad: bool = False,
        data_transpose: torch.Tensor | None = None,
        quantizer: Quantizer | None = None,
    ) -> Float8Tensor:
        """Wrap codes."""
        if not isinstance(requires_grad, bool):
            raise TypeError(
                "[Float8Tensor] expected requires_grad to be True or False, got"
                f" {type(requires_grad).__name__}: pass data_transpose by keyword"
            )
        self = cls.wrap(torch.Size(shape), dtype, data)
        self._data = data
        self._scale_inv = fp8_scale_inv
        self._fp8_dtype = DType.of(fp8_dtype)
        self._format = int(self._fp8_dtype)
        self._transpose = data_transpose
        self._transpose_version = self._writes
        self._quantizer = quantizer
        return self.requires_grad_() if requires_grad else self

    @classmethod
    def assembled(cls, shape: torch.Size, parts: Parts, facts: Mapping[str, Any]) -> Float8Tensor:
        """Make a tensor of `parts` and `facts`, such as those of another tensor."""
        data, scale_inv = parts
        assert data is not None and scale_inv is not None
        dtype, format = facts["dtype"], facts["fp8_dtype"]
        return cls(shape, dtype, data, scale_inv, format, quantizer=facts["quantizer"])

    @classmethod
    def part_shapes(
        cls, shape: torch.Size, facts: Mapping[str, Any]
    ) -> Sequence[Sequence[tuple[int, ...]]]:
        """The shapes that each part of a tensor of this shape may have."""
        return (shape,), ((2,), (1,), ())

    @classmethod
    def from_operands(
        cls, operands: Operands, like: torch.Tensor, quantizer: Quantizer | None
    ) -> Float8Tensor:
        """Wrap operands that a quantizer has made for GEMMs as a tensor."""
        rowwise, columnwise = operands.rowwise, operands.columnwise
        columns = columnwise.codes if isinstance(columnwise, Fp8Matrix) else None
        some: Any = columnwise if rowwise is None else rowwise
        codes = transpose(some.codes) if rowwise is None else some.codes
        codes = codes.view(like.shape)
        shape, dtype, scales = like.shape, like.dtype, some.scales
        return cls(shape, dtype, codes, scales, some.element, False, columns, quantizer)

    @property
    def scales(self) -> torch.Tensor:
        """fp32 `[2]` = {1/scale, scale}; tensors that users make may hold 1/scale only."""
        return scale_pair(self._scale_inv)

    def side(self, columnwise: bool) -> Fp8Matrix:
        """One side as an operand of a GEMM; transposed codes are cached until the values change."""
        codes = self.transposed_codes() if columnwise else self._data.contiguous()
        return Fp8Matrix(codes, self._scale_inv, self._format)

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantised, in fp32, fp16 or bf16."""
        return dequantize(self._data.contiguous(), self._format, self._scale_inv, dtype)

    def quantized(self, plain: torch.Tensor) -> Parts:
        """The parts that the quantizer makes of other values of this shape."""
        assert self._quantizer is not None
        made = self._quantizer.operands(plain, OperandRequest(self._quantizer, True, False)).rowwise
        assert isinstance(made, Fp8Matrix)
        return made.codes, made.scales

    def adopt(self, parts: Parts) -> None:
        """Replace codes and scale by these, without a copy."""
        data, scale_inv = parts
        assert data is not None and scale_inv is not None
        self._data, self._scale_inv = data, scale_pair(scale_inv)
        self._transpose = self._whole = None

    def drop_transpose(self) -> None:
        """Forget the transposed codes."""
        self._transpose = None

    def viewed(self, shape: Sequence[int]) -> Float8Tensor:
        """`view`, which is possible for any shape, because all codes have the same scale."""
        data = self._data.view(shape)
        view = self.with_parts([data, self._scale_inv], data.shape)
        view._whole = self._data if self._whole is None else self._whole
        if data.ndim > 0 and self.ndim > 0 and data.shape[-1] == self.shape[-1]:
            view._transpose, view._transpose_version = self.known_transpose, view._writes
        return view

    @property
    def known_transpose(self) -> torch.Tensor | None:
        """The cached transposed codes; None if the codes may have been written since."""
        current = self._transpose_version == self._writes and not self._is_uncounted()
        return self._transpose if current else None

    @property
    def _writes(self) -> int:
        """The version counter of the codes, which a write through any alias increments."""
        counts = self._data if self._whole is None else self._whole
        return 0 if counts.is_inference() else counts._version

    def _is_uncounted(self) -> bool:
        """Whether nothing tells of writes to the codes.

        This holds for inference tensors, for CPU codes in shared memory, which other processes may
        write, and in a CUDA graph capture, whose replays come after other writes.
        """
        in_processes = self._data.is_cpu and self._data.untyped_storage().is_shared()
        return in_processes or self._data.is_inference() or is_capturing()

    def transposed_codes(self) -> torch.Tensor:
        """Codes `[cols, rows]`, cached until the values change if all writes are counted."""
        known = self.known_transpose
        if known is None:
            known = transpose(self._data.contiguous())
            if not self._is_uncounted():
                self._transpose, self._transpose_version = known, self._writes
        return known

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Float8Tensor:
        """A tensor of the same kind, whose parts are those of this one after `function`."""
        other, known = super().mapped(function), self.known_transpose
        other._transpose = None if known is None else function(known)
        return other

    def get_usages(self) -> dict[str, bool]:
        """Which sides are there; row-wise codes always are, transposed codes if cached."""
        return {"rowwise": True, "columnwise": self.known_transpose is not None}

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Make or drop the transposed codes; the codes themselves always stay.

        Transposed codes are never cached for codes in shared memory, nor for inference tensors.
        """
        if columnwise_usage:
            self.transposed_codes()
        elif columnwise_usage is not None:
            self._transpose = None

    def description(self) -> str:
        """What `repr` says beside the values."""
        scale_inv = self._scale_inv.flatten()[0].item()
        return f"fp8_dtype={FP8_NAMES[int(self._fp8_dtype)]}, scale_inv={scale_inv}"


torch.serialization.add_safe_globals([Float8Tensor])


class _Float8Making(TensorMaking):
    """Base of public quantizers that return a `Float8Tensor`."""

    def _made(self, plain: torch.Tensor) -> Float8Tensor:
        operands = self.operands(plain, OperandRequest(self, True, self.columnwise_usage))  # type: ignore[arg-type, attr-defined]
        return Float8Tensor.from_operands(operands, plain, self)  # type: ignore[arg-type]


class Float8Quantizer(_Float8Making, DelayedQuantizer):
    """Quantises with a given scale and records the amax, as delayed scaling does.

    Args:
        scale: fp32 `[1]`.
        amax: fp32 `[1]`, raised to `max |x|`.
        fp8_dtype: `DType.kFloat8E4M3` or `DType.kFloat8E5M2`, or torch's dtype of that name.
        rowwise: make codes.
        columnwise: make transposed codes.

    >>> import torch
    >>> amax = torch.zeros(1)
    >>> quantizer = Float8Quantizer(torch.tensor([2.0]), amax, DType.kFloat8E4M3)
    >>> quantizer(torch.tensor([[1.0, -3.0]])).dequantize(), amax
    (tensor([[ 1., -3.]]), tensor([3.]))
    """

    def __init__(
        self,
        scale: torch.Tensor,
        amax: torch.Tensor,
        fp8_dtype: DType | torch.dtype | int,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        if not (isinstance(scale, torch.Tensor) and isinstance(amax, torch.Tensor | None)):
            raise TypeError(
                "[Float8Quantizer] expected scale and amax to be tensors, got"
                f" {type(scale).__name__} and {type(amax).__name__}"
            )
        self.dtype = DType.of(fp8_dtype)
        super().__init__(scale, amax, int(self.dtype))
        self.set_usage(rowwise=rowwise, columnwise=columnwise)

    def create_tensor_from_data(
        self,
        data: torch.Tensor,
        fake_dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        internal: bool = False,
    ) -> Float8Tensor:
        """A tensor of codes that were made with this scale, as it is now.

        Args:
            data: uint8 codes, which the tensor shares.
            fake_dtype: nominal dtype.
            requires_grad: autograd records operations on it.
            internal: without effect: there is one class of tensors.

        Raises:
            TypeError: `data` is no tensor of uint8.

        >>> quantizer = Float8Quantizer(torch.tensor([2.0]), torch.zeros(1), DType.kFloat8E4M3)
        >>> codes = torch.tensor([[0x40]], dtype=torch.uint8)
        >>> quantizer.create_tensor_from_data(codes).dequantize()
        tensor([[1.]])
        """
        if not isinstance(data, torch.Tensor) or data.dtype is not torch.uint8:
            kind = data.dtype if isinstance(data, torch.Tensor) else type(data).__name__
            raise TypeError(f"[Float8Quantizer] expected data to be codes of uint8, got {kind}")
        assert self.scale is not None
        scales = torch.cat([self.scale.reciprocal(), self.scale])
        return Float8Tensor(
            data.shape, fake_dtype, data, scales, self.dtype, requires_grad, quantizer=self
        )

    @classmethod
    def of(cls, quantizer: DelayedQuantizer) -> Float8Quantizer:
        """The public quantizer with the same cast as a quantizer of modules."""
        return cls(quantizer.scale, quantizer.amax, quantizer.format)  # type: ignore[arg-type]


class Float8CurrentScalingQuantizer(FindsScales, _Float8Making, CurrentQuantizer):
    """Quantises with the scale that follows from the amax of the tensor itself.

    Args:
        fp8_dtype: `DType.kFloat8E4M3` or `DType.kFloat8E5M2`, or torch's dtype of that name.
        device: accepted for older callers; results lie where the input does.
        rowwise: make codes.
        columnwise: make transposed codes.
        with_amax_reduction: take the amax over all ranks of a group, which hold parts of one tensor
            and all cast at the same time.
        amax_reduction_group: this group; None is all ranks.
        force_pow_2_scales: round scales down to powers of two.
        amax_epsilon: smaller amaxes are raised to this value.

    Raises:
        TypeError: `amax_reduction_group` is no process group.

    >>> import torch
    >>> quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3)
    >>> quantizer(torch.tensor([[1.0, 448.0]])).dequantize()
    tensor([[  1., 448.]])
    """

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype | int,
        device: torch.device | str | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
    ) -> None:
        check_group(type(self).__name__, "amax_reduction_group", amax_reduction_group)
        self.dtype = DType.of(fp8_dtype)
        super().__init__(int(self.dtype), force_pow_2_scales, amax_epsilon)
        self.set_usage(rowwise=rowwise, columnwise=columnwise)
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.casts_many = not with_amax_reduction  # each cast has a collective

    def module_settings(self) -> tuple[Any, ...]:
        """As in the base class; empty where amaxes are reduced."""
        return () if self.with_amax_reduction else super().module_settings()

    def operands(self, x: torch.Tensor, request: OperandRequest) -> Operands:
        """Find the scale, of all ranks where amaxes are reduced, then cast."""
        if not (self.with_amax_reduction and dist.is_available() and dist.is_initialized()):
            return super().operands(x, request)
        group = self.amax_reduction_group
        group = dist.group.WORLD if group is None else group
        return self.of_shards(group).operands(x, request)

    def make_empty(self, shape: Sequence[int], **options: Any) -> Float8Tensor:
        """See `TensorMaking`; no rank waits for others."""
        alone = self.copy()
        alone.with_amax_reduction = False
        made = super(Float8CurrentScalingQuantizer, alone).make_empty(shape, **options)
        made._quantizer = self
        return made

    def fused_arguments(self, request: OperandRequest | None) -> FusedArguments:
        """The fused kernel finds the scale, but for reduced amaxes only makes the plain tensor."""
        if self.with_amax_reduction:
            return FusedArguments(True, epsilon=0.0)
        return super().fused_arguments(request)

    @classmethod
    def of(cls, quantizer: CurrentQuantizer) -> Float8CurrentScalingQuantizer:
        """The public quantizer with the same cast as a quantizer of modules."""
        return cls(
            quantizer.format,
            force_pow_2_scales=quantizer.power_of_2,
            amax_epsilon=quantizer.epsilon,
        )


DelayedQuantizer.public_class = Float8Quantizer
CurrentQuantizer.public_class = Float8CurrentScalingQuantizer
