"""Quantizers: the only way a tensor becomes FP8.

A quantizer turns a high-precision matrix into `Operands`, and answers whatever else depends on how
that is done: what a kernel that makes the tensor may do of it, which tensors it needs from call to
call, what it is in ONNX and under a documented name. The identity leaves a tensor as it is; those
that cast stand beside the rules of their recipes, in `recipes/`.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar

import torch

from transformer_engine.pytorch.dtypes import E4M3, E5M2
from transformer_engine.pytorch.fp8.operands import (
    Fp8Matrix,
    FusedArguments,
    FusedOutputs,
    OperandRequest,
    Operands,
    PendingCast,
    Result,
    Value,
)
from transformer_engine.pytorch.fp8.padding import pad
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.kernels.moments import moments
from transformer_engine.pytorch.kernels.quantize import quantize
from transformer_engine.pytorch.scale_layout import WHOLE, ScaleLayout

Tensors = tuple[torch.Tensor, ...]
DESCRIBED: dict[str, type[Quantizer]] = {}  # native classes, by their scaling


class Quantizer:
    """Base: `operands(x, request)` makes a 2-D tensor ready for the GEMMs named in the request.

    A class that is made with `native=True` calls nothing but `_C`, the same for every tensor of a
    shape, so that its calls may be recorded. Subclasses have to say so again.

    Attributes:
        scaling: what statistics call the scaling of its casts; empty in high precision.
        format: element type of its codes, a value of `DType`; -1 in high precision.
        is_fp8: it casts to FP8.
        rounds_once: a kernel that makes the tensor rounds it to FP8 from fp32; otherwise to the
            dtype of activations first.
        recasts_alike: casting the same values in backward gives the same codes.
        replaces: `result` may return something else than its argument.
        shard_rows: of how many rows a shard must have a multiple, see `of_shards`.
        public_class: of the documented quantizer that does the same; it has a method `of`.
    """

    shard_rows = 16
    scaling = ""
    format = -1
    is_fp8 = False
    rounds_once = False
    recasts_alike = True
    replaces = True
    native = False
    public_class: ClassVar[Any] = None

    def __init_subclass__(cls, native: bool = False, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.native = native
        if native:
            DESCRIBED[cls.scaling] = cls

    def constants(self) -> tuple[Any, ...] | None:
        """What `rebuilt` makes the same quantizer of, beside scaling state; None: it cannot.

        No floats: under dynamic shapes they are inputs of a graph, until they are compared.
        """
        return None

    def description(self) -> tuple[Any, ...] | None:
        """Its class and its constants; None where compiled code has to trace it."""
        constants = self.constants() if self.native else None
        return None if constants is None else (self.scaling, *constants)

    @classmethod
    def rebuilt(cls, description: Any, column: Any) -> Quantizer:
        """The quantizer of a description; `column` is the scale and amax of a scaling state."""
        return cls(*description[1:])

    @property
    def cache_key(self) -> Hashable:
        """Cached weights of equal keys can stand for each other."""
        return self.scaling

    def operands(self, x: torch.Tensor, request: OperandRequest) -> Operands:
        """Quantise `x` `[rows, cols]` (fp32, fp16 or bf16, contiguous)."""
        raise NotImplementedError

    def cast(
        self, x: torch.Tensor, scales: torch.Tensor | None, request: OperandRequest
    ) -> Operands:
        """`operands`, with the scales that the producer of `x` has found, if it has."""
        return self.operands(x, request)

    def padded(self, x: torch.Tensor, padding: int, request: OperandRequest) -> Operands:
        """Quantise `x` with so many zero rows added; they change no result."""
        return self.operands(pad(x, padding), request)

    def refreshed(
        self, x: torch.Tensor, request: OperandRequest, cached: Operands | None
    ) -> Operands:
        """Quantise `x`; what is cached of it has an equal `cache_key` and may be written to."""
        return self.operands(x, request)

    def from_fp8(self, weight: Fp8Matrix, request: OperandRequest, dtype: torch.dtype) -> Operands:
        """The operands of a weight that exists in FP8 alone.

        A column-wise side that is None here is made in the backward, for one GEMM. Operands in
        high precision have `dtype`.
        """
        raise NotImplementedError

    def fused_arguments(self, request: OperandRequest | None) -> FusedArguments:
        """What a kernel that makes the tensor does for this quantizer: nothing but the tensor.

        Epsilons are literals here: torch.compile makes an input of a default that is a float.
        """
        return FusedArguments(True, epsilon=0.0)

    def fused_result(self, request: OperandRequest | None, made: FusedOutputs) -> Result:
        """The outputs of such a kernel as the result of its stage: here, a pending cast."""
        assert made.plain is not None and request is not None
        return PendingCast(made.plain, made.scales, request, made.bias_grad)

    def record_amax(self, x: torch.Tensor) -> None:
        """Record the amax of `x`, which is used without a cast."""

    def process_gemm_output(self, x: torch.Tensor) -> torch.Tensor:
        """The result of a GEMM, as it is used (of output, dgrad and wgrad quantizers)."""
        return x

    def for_recompute(self, scale: torch.Tensor | None) -> Quantizer:
        """The quantizer of a recompute: the first scale, and no amax is recorded."""
        return self

    def persistent_tensors(self) -> Tensors:
        """The tensors that outlive a call and that casts read, raise or write: scales, amaxes."""
        return ()

    def exported_scale(self, x: torch.Tensor) -> torch.Tensor:
        """The scale of `x` (fp32) in torch's own operators, a scalar: for a graph of ONNX."""
        raise NotImplementedError

    def of_shards(self, group: Any) -> Quantizer | None:
        """The quantizer of this rank's rows of a tensor: the codes are those of the whole tensor.

        None where only the whole tensor can be cast.
        """
        return None

    def public(self) -> Any:
        """The documented quantizer that does the same; None where there is none."""
        return None if self.public_class is None else self.public_class.of(self)


class WrappingQuantizer(Quantizer):
    """Base of quantizers that add something to another one's work (the debugger does).

    Kernels that produce a tensor serve `inner_request`, with a plain result beside where
    `needs_plain`, and `finish` makes of both what the GEMMs will take.
    """

    inner: Quantizer

    @property
    def needs_plain(self) -> bool:
        """Whether `finish` needs the plain tensor."""
        return True

    def inner_request(self, request: OperandRequest) -> OperandRequest:
        """The request that the wrapped quantizer serves."""
        raise NotImplementedError

    def finish(
        self, x: torch.Tensor | None, cast: torch.Tensor | Operands, request: OperandRequest
    ) -> Operands:
        """The operands of `x`; `cast` is what a kernel made of `inner_request`."""
        raise NotImplementedError

    def fused_arguments(self, request: OperandRequest | None) -> FusedArguments:
        """Those of the wrapped quantizer, and the plain tensor where it is needed."""
        assert request is not None
        plain, inner = self.needs_plain, self.inner_request(request)
        fused = inner.quantizer.fused_arguments(inner)
        return fused._replace(plain=True) if plain else fused

    def fused_result(self, request: OperandRequest | None, made: FusedOutputs) -> Operands:
        """What the wrapped quantizer makes of it, finished."""
        assert request is not None
        inner = self.inner_request(request)
        cast = inner.quantizer.fused_result(inner, made)
        return self.finish(
            made.plain, cast.cast() if isinstance(cast, PendingCast) else cast, request
        )

    def for_recompute(self, scale: torch.Tensor | None) -> Quantizer:
        """The same around the wrapped quantizer's own."""
        copied = copy.copy(self)
        copied.inner = self.inner.for_recompute(scale)
        return copied

    def persistent_tensors(self) -> Tensors:
        """Those of the wrapped quantizer."""
        return self.inner.persistent_tensors()


class IdentityQuantizer(Quantizer, native=True):
    """No quantisation: both sides are the tensor itself; the GEMM sums the bias gradient."""

    def constants(self) -> tuple[Any, ...]:
        """None."""
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
        """The kernel takes the moments."""
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
        """Cast with one scale in one pass; see `kernels.quantize` for the last three."""
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

    None stands for the identity.
    """

    __slots__ = (
        "dgrad",
        "fast_accumulation",
        "fp8",
        "grad_output",
        "input",
        "native",
        "output",
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
    ) -> None:
        self.input = input or IDENTITY
        self.weight = weight or IDENTITY
        self.grad_output = grad_output or IDENTITY
        self.output = output or IDENTITY
        self.dgrad = dgrad or IDENTITY
        self.wgrad = wgrad or IDENTITY
        self.fp8 = self.input.is_fp8
        self.wrapped = False  # the debugger inspects these GEMMs
        six = (self.input, self.weight, self.grad_output, self.output, self.dgrad, self.wgrad)
        # They do nothing but call `_C`, the same for every tensor of a shape.
        self.native = all(quantizer.native for quantizer in six)
        # Of fprop, dgrad, wgrad: the short accumulator of FP8 tensor cores is for fprop only.
        self.fast_accumulation = (self.fp8, False, False)

    def replaced(self, changed: Mapping[str, Quantizer]) -> GemmQuantizers:
        """The same with some quantizers replaced by those of the debugger; self where none is."""
        own = {name: getattr(self, name) for name in SIX}
        changed = {name: q for name, q in changed.items() if q is not own[name]}
        if not changed:
            return self
        copy = GemmQuantizers(**{**own, **changed})
        copy.fp8 = self.fp8
        copy.fast_accumulation = self.fast_accumulation
        copy.wrapped = self.wrapped or any(q is not IDENTITY for q in changed.values())
        return copy

    def for_recompute(self, scales: torch.Tensor | None) -> GemmQuantizers:
        """Those of a recompute, with the fp32 `[3]` scales of the first forward, if any."""
        first = [None if scales is None else scales[i : i + 1] for i in range(2)]
        again = GemmQuantizers(
            self.input.for_recompute(first[0]),
            self.weight.for_recompute(first[1]),
            self.grad_output,
            self.output,
            self.dgrad,
            self.wgrad,
        )
        again.fp8, again.wrapped = self.fp8, self.wrapped
        again.fast_accumulation = self.fast_accumulation
        return again

    def description(self) -> tuple[Any, ...] | None:
        """Constants from which `described_gemm` makes the same; None where nothing can."""
        six = (self.input, self.weight, self.grad_output, self.output, self.dgrad, self.wgrad)
        constants = [quantizer.description() for quantizer in six]
        if self.wrapped or None in constants:
            return None
        return (*constants, self.fast_accumulation)

    def persistent_tensors(self) -> Tensors:
        """The tensors that outlive a call and that its casts read or write, see `Quantizer`."""
        return tuple(t for name in SIX for t in getattr(self, name).persistent_tensors())


HIGH_PRECISION_GEMM = GemmQuantizers()
