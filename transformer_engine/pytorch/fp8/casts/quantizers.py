"""Quantizers: the only way a tensor becomes FP8.

A quantizer turns a high-precision matrix into `Operands`. It also knows everything that depends on
the way it casts: which part of the cast a fused kernel can do, which tensors persist between calls,
its form in ONNX graphs, and the documented class that it corresponds to. `IdentityQuantizer` leaves
a tensor as it is. Quantizers that cast are defined with their recipes, in `recipes/`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, ClassVar

import torch

from transformer_engine.pytorch.dtypes import E4M3, E5M2, FP8_NAMES
from transformer_engine.pytorch.fp8.casts.operands import (
    Fp8Matrix,
    FusedArguments,
    FusedOutputs,
    OperandRequest,
    Operands,
    PendingCast,
    Result,
    Value,
)
from transformer_engine.pytorch.fp8.casts.padding import pad
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.kernels.moments import moments
from transformer_engine.pytorch.kernels.quantize import quantize
from transformer_engine.pytorch.scale_layout import WHOLE, ScaleLayout

Tensors = tuple[torch.Tensor, ...]
DESCRIBED: dict[str, type[Quantizer]] = {}  # native classes, by their scaling


class Quantizer:
    """Base of quantizers: `operands(x, request)` casts a 2-D tensor for the GEMMs of a request.

    A class defined with `native=True` calls nothing but `_C`, in the same way for all tensors of a
    shape, so that its calls may be recorded. Subclasses do not inherit this.

    Attributes:
        scaling: name of the scaling in statistics; empty in high precision.
        format: element type of its codes, a value of `DType`; -1 in high precision.
        is_fp8: it casts to FP8.
        rounds_once: a fused kernel rounds fp32 to FP8, not to the dtype of activations first.
        recasts_alike: casting the same values again in backward gives the same codes.
        casts_columns_later: the column-wise side can be made from the values alone, at any time.
        casts_many: it has `cast_many(tensors, requests)`, which casts several in few launches.
        calls_features, replaces: the debugger calls features for the tensor; one may replace it.
        shard_rows: the rows of a shard must be a multiple of this, see `of_shards`.
        public_class: the documented quantizer that does the same; it has a method `of`.
    """

    shard_rows = 16
    scaling = ""
    format = -1
    is_fp8 = False
    rounds_once = False
    recasts_alike = True
    casts_columns_later = False
    casts_many = False
    calls_features = False
    replaces = False
    native = False
    public_class: ClassVar[Any] = None

    def __init_subclass__(cls, native: bool = False, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.native = native
        if native:
            DESCRIBED[cls.scaling] = cls

    def constants(self) -> tuple[Any, ...] | None:
        """The arguments for `rebuilt` beside scaling state; None if it cannot be rebuilt.

        They hold no floats, which torch.compile turns into inputs of a graph (dynamic shapes).
        """
        return None

    def description(self) -> tuple[Any, ...] | None:
        """Class and constants, for `rebuilt`; None if compiled code has to trace the quantizer."""
        constants = self.constants() if self.native else None
        return None if constants is None else (self.scaling, *constants)

    @classmethod
    def rebuilt(cls, description: Any, column: Any) -> Quantizer:
        """The quantizer of a description; `column` is the scale and amax of a scaling state."""
        return cls(*description[1:])

    def module_settings(self) -> tuple[Any, ...]:
        """The scaling, and constants from which modules make their own quantizer that casts alike.

        Empty for a quantizer that modules use as it is. Floats are written as str, see `constants`.
        """
        return ()

    @property
    def cache_key(self) -> Hashable:
        """A key: a cached weight can be used again if it was cached under an equal one."""
        return self.scaling

    def operands(self, x: torch.Tensor, request: OperandRequest) -> Operands:
        """Quantise `x` `[rows, cols]` (fp32, fp16 or bf16, contiguous)."""
        raise NotImplementedError

    def cast(
        self, x: torch.Tensor, scales: torch.Tensor | None, request: OperandRequest
    ) -> Operands:
        """`operands`, with the scales that the producer of `x` has computed, or None."""
        return self.operands(x, request)

    def padded(self, x: torch.Tensor, padding: int, request: OperandRequest) -> Operands:
        """Quantise `x` with this many rows of zeros appended, which change no result."""
        return self.operands(pad(x, padding), request)

    def refreshed(
        self, x: torch.Tensor, request: OperandRequest, cached: Operands | None
    ) -> Operands:
        """Quantise `x`, possibly into the memory of cached operands with an equal `cache_key`."""
        return self.operands(x, request)

    def from_fp8(self, weight: Fp8Matrix, request: OperandRequest, dtype: torch.dtype) -> Operands:
        """The operands of a weight kept in FP8.

        If the column-wise side is None, the backward makes it, only for its GEMM. Operands in high
        precision have `dtype`.
        """
        raise NotImplementedError

    def fused_arguments(self, request: OperandRequest | None) -> FusedArguments:
        """The arguments with which a fused kernel casts for this quantizer; here it does not cast.

        The epsilon is a literal: torch.compile turns a default argument that is a float into an
        input of the graph.
        """
        return FusedArguments(True, epsilon=0.0)

    def fused_result(self, request: OperandRequest | None, made: FusedOutputs) -> Result:
        """The result of a stage from the outputs of its fused kernel; here a pending cast."""
        assert made.plain is not None and request is not None
        return PendingCast(made.plain, made.scales, request, made.bias_grad)

    def record_amax(self, x: torch.Tensor) -> None:
        """Record the amax of a tensor that is not cast."""

    def process_gemm_output(self, x: torch.Tensor) -> torch.Tensor:
        """Process the result of a GEMM (quantizers of output, dgrad and wgrad)."""
        return x

    def for_recompute(self, scale: torch.Tensor | None) -> Quantizer:
        """The quantizer of a recompute: uses the scale of the first forward, records no amax."""
        return self

    def persistent_tensors(self) -> Tensors:
        """Scales and amaxes: the tensors that casts read or write, and that outlive a call."""
        return ()

    def exported_scale(self, x: torch.Tensor) -> torch.Tensor:
        """The scale of `x` (fp32), a scalar computed by torch's own operators, for ONNX graphs."""
        raise NotImplementedError

    def of_shards(self, group: Any) -> Quantizer | None:
        """The quantizer that casts this rank's rows of a tensor to the codes of the whole tensor.

        None if only the whole tensor can be cast.
        """
        return None

    def public(self) -> Any:
        """The documented quantizer that does the same; None where there is none."""
        return None if self.public_class is None else self.public_class.of(self)


class IdentityQuantizer(Quantizer, native=True):
    """No quantisation: both sides are the tensor itself. Matmul computes the bias gradient."""

    casts_columns_later = True

    def constants(self) -> tuple[Any, ...]:
        """An empty tuple: it has no arguments."""
        return ()

    def operands(self, x: torch.Tensor, request: OperandRequest) -> Operands:
        """Both sides are `x`."""
        if request.moments is not None:
            moments(x.contiguous(), request.moments, request.active)
        return Operands(x, x)

    def from_fp8(self, weight: Fp8Matrix, request: OperandRequest, dtype: torch.dtype) -> Operands:
        """The values, dequantised for this call."""
        x = dequantize(weight.codes, weight.format, weight.scales, dtype)
        return Operands(self.operands(x, request).rowwise, None)

    def fused_arguments(self, request: OperandRequest | None) -> FusedArguments:
        """The kernel does not cast, but merges the moments."""
        if request is None:
            return FusedArguments(True, epsilon=0.0)
        return FusedArguments(True, epsilon=0.0, moments=request.moments, active=request.active)

    def fused_result(self, request: OperandRequest | None, made: FusedOutputs) -> Value:
        """The tensor, with the bias gradient where the kernel has summed it."""
        plain = made.plain
        assert plain is not None
        return plain if made.bias_grad is None else Operands(plain, plain, made.bias_grad)


class Fp8Quantizer(Quantizer):
    """Base of FP8 quantizers.

    Args:
        format: element type of the codes, a value of `DType`.
    """

    is_fp8 = True
    layout: ScaleLayout = WHOLE

    def __init__(self, format: int) -> None:
        if format not in (E4M3, E5M2):
            raise ValueError(f"[quantizer] expected format E4M3 (5) or E5M2 (6), got {format}")
        self.format = format
        self.matrix_format = self.layout.code(format)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({FP8_NAMES[self.format]})"

    def from_fp8(self, weight: Fp8Matrix, request: OperandRequest, dtype: torch.dtype) -> Operands:
        """The codes as they are."""
        return Operands(weight, None)

    def cast_with(
        self,
        x: torch.Tensor,
        request: OperandRequest,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> Operands:
        """Cast with one scale in one pass; for the last three arguments see `kernels.quantize`."""
        codes, transposed, own_scales, bias_grad = quantize(
            x,
            self.format,
            scale,
            amax,
            scales,
            request.rowwise,
            request.columnwise,
            request.bias_grad,
            request.moments,
            request.active,
        )
        scales = own_scales if scales is None else scales
        assert scales is not None
        return self.pack(codes, transposed, scales, bias_grad)

    def pack(
        self,
        codes: torch.Tensor | None,
        transposed: torch.Tensor | None,
        scales: torch.Tensor,
        bias_grad: torch.Tensor | None = None,
    ) -> Operands:
        """Wrap codes that a kernel has written, with one scale."""
        rowwise = None if codes is None else Fp8Matrix(codes, scales, self.matrix_format)
        columns = None if transposed is None else Fp8Matrix(transposed, scales, self.matrix_format)
        return Operands(rowwise, columns, bias_grad)


IDENTITY = IdentityQuantizer()
SIX = ("input", "weight", "grad_output", "output", "dgrad", "wgrad")


class GemmQuantizers:
    """The six quantizers of one Matmul: three before its GEMMs, three after them.

    None stands for the identity. With `backward_override`, see `Float8CurrentScaling`, the
    gradient is not cast, and Matmul does not request column-wise codes.
    """

    __slots__ = (
        "backward_override",
        "dgrad",
        "fast_accumulation",
        "fp8",
        "grad_output",
        "input",
        "native",
        "output",
        "pads",
        "weight",
        "wgrad",
        "wrapped",
    )

    def __init__(
        self,
        input: Quantizer | None = None,
        weight: Quantizer | None = None,
        grad_output: Quantizer | None = None,
        output: Quantizer | None = None,
        dgrad: Quantizer | None = None,
        wgrad: Quantizer | None = None,
        *,
        backward_override: str | None = None,
    ) -> None:
        self.input = input or IDENTITY
        self.weight = weight or IDENTITY
        self.grad_output = IDENTITY if backward_override else grad_output or IDENTITY
        self.output = output or IDENTITY
        self.dgrad = dgrad or IDENTITY
        self.wgrad = wgrad or IDENTITY
        self.backward_override = backward_override
        self.fp8 = self.input.is_fp8
        self.pads = self.fp8  # tokens are padded to what FP8 GEMMs take
        self.wrapped = False  # the debugger inspects these GEMMs
        six = (self.input, self.weight, self.grad_output, self.output, self.dgrad, self.wgrad)
        # The quantizers do nothing but call `_C`, the same for every tensor of a shape.
        self.native = all(quantizer.native for quantizer in six)
        # For fprop, dgrad, wgrad: only fprop may sum in the short accumulator of FP8 tensor cores.
        self.fast_accumulation = (self.fp8, False, False)

    def replaced(self, changed: Mapping[str, Quantizer], wrapped: bool = False) -> GemmQuantizers:
        """A copy with some quantizers replaced by those of the debugger; self if nothing changes.

        With `wrapped`, the copy counts as inspected even if no quantizer is replaced.
        """
        changed = {name: q for name, q in changed.items() if q is not getattr(self, name)}
        wraps = wrapped or any(q is not IDENTITY for q in changed.values())
        if not changed and self.wrapped >= wraps:
            return self
        return self._with(changed, wraps)

    def _with(self, changed: Mapping[str, Quantizer], wraps: bool = False) -> GemmQuantizers:
        made = GemmQuantizers(**{name: getattr(self, name) for name in SIX} | dict(changed))
        made.fp8, made.pads = self.fp8, self.pads
        made.backward_override = self.backward_override
        made.fast_accumulation = self.fast_accumulation
        made.wrapped = self.wrapped or wraps
        return made

    def for_recompute(self, scales: torch.Tensor | None) -> GemmQuantizers:
        """The quantizers of a recompute; `scales` fp32 `[3]` are those of the first forward."""
        first = [None if scales is None else scales[i : i + 1] for i in range(2)]
        quantizers = zip(("input", "weight"), (self.input, self.weight), first, strict=True)
        return self._with({name: q.for_recompute(scale) for name, q, scale in quantizers})

    @property
    def fp8_gemms(self) -> tuple[str, ...]:
        """The GEMMs that the recipe runs in FP8, of fprop, dgrad and wgrad."""
        if not self.fp8:
            return ()
        return ("fprop",) if self.backward_override else ("fprop", "dgrad", "wgrad")

    def description(self) -> tuple[Any, ...] | None:
        """Constants for `described_gemm`; None if a quantizer cannot be rebuilt."""
        six = (self.input, self.weight, self.grad_output, self.output, self.dgrad, self.wgrad)
        constants = [quantizer.description() for quantizer in six]
        if self.wrapped or None in constants:
            return None
        return (*constants, self.backward_override, self.fast_accumulation)

    def persistent_tensors(self) -> Tensors:
        """See `Quantizer.persistent_tensors`."""
        return tuple(t for name in SIX for t in getattr(self, name).persistent_tensors())


HIGH_PRECISION_GEMM = GemmQuantizers()
