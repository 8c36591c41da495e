"""Quantizers: the only way a tensor becomes FP8.

A quantizer turns a high-precision matrix into `Operands`. Kernels that produce a tensor may do the
quantizer's work themselves; what they need to know is in `format`, `scaling` and the attributes
that go with it. The identity quantizer leaves a tensor as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from enum import Enum

import torch

from transformer_engine.pytorch.dtypes import E4M3, E5M2, FP8_NAMES
from transformer_engine.pytorch.fp8.operands import Demand, Fp8Matrix, Operands
from transformer_engine.pytorch.kernels.amax import amax as amax_of
from transformer_engine.pytorch.kernels.amax import current_scales
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.kernels.moments import moments
from transformer_engine.pytorch.kernels.quantize import quantize
from transformer_engine.pytorch.kernels.quantize_blocks import quantize_blocks
from transformer_engine.pytorch.scale_layout import WHOLE, ScaleLayout, block_layout


class Scaling(Enum):
    """Where a quantizer's scale comes from."""

    NONE = "none"
    DELAYED = "delayed"
    CURRENT = "current"
    BLOCKS = "blocks"


class Quantizer:
    """Base: `operands(x, demand)` makes a 2-D tensor ready for the GEMMs named in the demand."""

    scaling = Scaling.NONE
    format = -1
    replaces = True  # `result` may return something else than it was given

    @property
    def cache_key(self) -> Hashable:
        """Cached weights of equal keys can stand for each other."""
        return self.scaling

    def operands(self, x: torch.Tensor, demand: Demand) -> Operands:
        """Quantise `x` `[rows, cols]` (fp32, fp16 or bf16, contiguous)."""
        raise NotImplementedError

    def padded(self, x: torch.Tensor, padding: int, demand: Demand) -> Operands:
        """Quantise `x` with so many zero rows added; they change no result."""
        return self.operands(pad(x, padding), demand)

    def refreshed(self, x: torch.Tensor, demand: Demand, cached: Operands | None) -> Operands:
        """Quantise `x`; what is cached of it has an equal `cache_key` and may be written to."""
        return self.operands(x, demand)

    def kept(self, weight: Fp8Matrix, demand: Demand, dtype: torch.dtype) -> Operands:
        """The operands of a weight that exists in FP8 alone.

        A column-wise side that is wanted and None here is made of the weight in backward, for the
        time of one GEMM.

        Args:
            weight: codes `[out, in]`.
            demand: which sides GEMMs will take.
            dtype: of operands in high precision.
        """
        raise NotImplementedError

    def note(self, x: torch.Tensor) -> None:
        """`x` goes by without a cast: take down what would have been taken down with it."""

    def result(self, x: torch.Tensor) -> torch.Tensor:
        """What becomes of the result of a GEMM (of output, dgrad and wgrad quantizers)."""
        return x

    def repeating(self, scale: torch.Tensor | None) -> Quantizer:
        """What does the same again, with the scale of the first time, and leaves no trace."""
        return self


class WrappingQuantizer(Quantizer):
    """Base of quantizers that add something to another one's work (the debugger does).

    Kernels that produce a tensor serve `inner_demand`, with a plain result beside where
    `needs_plain`, and `finish` makes of both what the GEMMs will take.
    """

    inner: Quantizer

    @property
    def needs_plain(self) -> bool:
        """Whether `finish` must be given the plain tensor."""
        return True

    def inner_demand(self, demand: Demand) -> Demand:
        """The part of a demand that the wrapped quantizer serves."""
        raise NotImplementedError

    def finish(
        self, x: torch.Tensor | None, cast: torch.Tensor | Operands, demand: Demand
    ) -> Operands:
        """The operands of `x`; `cast` is what a kernel made of `inner_demand`."""
        raise NotImplementedError

    def repeating(self, scale: torch.Tensor | None) -> Quantizer:
        """The same around what repeats the wrapped one."""
        again = copy.copy(self)
        again.inner = self.inner.repeating(scale)
        return again


class IdentityQuantizer(Quantizer):
    """No quantisation: both sides are the tensor itself; the GEMM sums the bias gradient."""

    def operands(self, x: torch.Tensor, demand: Demand) -> Operands:
        """Both sides are `x`."""
        if demand.moments is not None:
            moments(x.contiguous(), demand.moments, demand.active)
        return Operands(x, x)

    def kept(self, weight: Fp8Matrix, demand: Demand, dtype: torch.dtype) -> Operands:
        """The values, dequantised for this call."""
        x = dequantize(weight.codes, weight.format, weight.scales, dtype)
        return Operands(self.operands(x, demand).rowwise, None)


class CalibratingQuantizer(IdentityQuantizer):
    """High precision that notes `max |x|`, so that FP8 can start from a known scale."""

    def __init__(self, amax: torch.Tensor) -> None:
        self.amax = amax

    def operands(self, x: torch.Tensor, demand: Demand) -> Operands:
        """Both sides are `x`; its amax replaces the running one."""
        self.note(x)
        return super().operands(x, demand)

    def note(self, x: torch.Tensor) -> None:
        """The amax."""
        self.amax.copy_(amax_of(x))

    def repeating(self, scale: torch.Tensor | None) -> Quantizer:
        """High precision alone."""
        return IDENTITY


class Fp8Quantizer(Quantizer):
    """What FP8 quantizers share: the format, and how scales belong to the codes."""

    layout: ScaleLayout = WHOLE

    def __init__(self, format: int) -> None:
        if format not in (E4M3, E5M2):
            raise ValueError(f"[quantizer] expected format E4M3 (5) or E5M2 (6), got {format}")
        self.format = format
        self.matrix_format = self.layout.code(format)

    def kept(self, weight: Fp8Matrix, demand: Demand, dtype: torch.dtype) -> Operands:
        """The codes as they are."""
        return Operands(weight, None)

    def pack(
        self,
        codes: torch.Tensor | None,
        transposed: torch.Tensor | None,
        scales: torch.Tensor,
        bias_grad: torch.Tensor | None = None,
    ) -> Operands:
        """Wrap codes that a kernel has written."""
        rowwise = None if codes is None else Fp8Matrix(codes, scales, self.matrix_format)
        columns = None if transposed is None else Fp8Matrix(transposed, scales, self.matrix_format)
        return Operands(rowwise, columns, bias_grad)


class DelayedQuantizer(Fp8Quantizer):
    """Scale from the history; the amax of this tensor goes into it.

    Args:
        scale: fp32 `[1]`, read by the kernel.
        amax: fp32 `[1]`, raised to `max |x|`; None to leave no trace (evaluation).
        format: value of `DType`.
    """

    scaling = Scaling.DELAYED

    def __init__(self, scale: torch.Tensor, amax: torch.Tensor | None, format: int) -> None:
        super().__init__(format)
        self.scale = scale
        self.amax = amax

    def operands(self, x: torch.Tensor, demand: Demand) -> Operands:
        """Cast with the stored scale, in one pass."""
        codes, transposed, scales, bias_grad = quantize(
            x,
            self.format,
            self.scale,
            self.amax,
            None,
            demand.rowwise,
            demand.columnwise,
            demand.bias_grad,
            demand.moments,
            demand.active,
        )
        assert scales is not None
        return self.pack(codes, transposed, scales, bias_grad)

    def repeating(self, scale: torch.Tensor | None) -> Quantizer:
        """The same format with a given scale."""
        assert scale is not None
        return DelayedQuantizer(scale, None, self.format)

    def __repr__(self) -> str:
        return f"DelayedQuantizer({FP8_NAMES[self.format]})"


class CurrentQuantizer(Fp8Quantizer):
    """Scale from the tensor in hand: `fp8_max / max |x|`.

    Args:
        format: value of `DType`.
        power_of_2: round scales down to powers of two.
        epsilon: least amax.
    """

    scaling = Scaling.CURRENT

    def __init__(self, format: int, power_of_2: bool = False, epsilon: float = 0.0) -> None:
        super().__init__(format)
        self.power_of_2 = power_of_2
        self.epsilon = epsilon

    def operands(self, x: torch.Tensor, demand: Demand) -> Operands:
        """Find the scale, then cast."""
        return self.cast(x, current_scales(x, self.format, self.power_of_2, self.epsilon), demand)

    def cast(self, x: torch.Tensor, scales: torch.Tensor, demand: Demand) -> Operands:
        """Cast with scales that the producer of `x` has found already."""
        codes, transposed, _, bias_grad = quantize(
            x,
            self.format,
            None,
            None,
            scales,
            demand.rowwise,
            demand.columnwise,
            demand.bias_grad,
            demand.moments,
            demand.active,
        )
        return self.pack(codes, transposed, scales, bias_grad)

    def __repr__(self) -> str:
        return f"CurrentQuantizer({FP8_NAMES[self.format]})"


class BlockQuantizer(Fp8Quantizer):
    """Scales from the blocks of the tensor in hand, along rows and along columns on their own.

    Args:
        format: value of `DType`.
        dimensions: of a block: 1 (1 x 128 values along the axis that a GEMM sums over) or 2.
        power_of_2: round scales down to powers of two.
        epsilon: least amax.
    """

    scaling = Scaling.BLOCKS

    def __init__(
        self, format: int, dimensions: int, power_of_2: bool = True, epsilon: float = 0.0
    ) -> None:
        self.layout = block_layout(dimensions)
        super().__init__(format)
        self.dimensions = dimensions
        self.power_of_2 = power_of_2
        self.epsilon = epsilon

    @property
    def cache_key(self) -> Hashable:
        """Blocks of one kind stand for each other."""
        return (self.scaling, self.dimensions, self.power_of_2, self.epsilon)

    def operands(self, x: torch.Tensor, demand: Demand) -> Operands:
        """Find the scales of all blocks and cast, in one pass."""
        codes, scales, transposed, column_scales, bias_grad = quantize_blocks(
            x,
            self.matrix_format,
            self.power_of_2,
            self.epsilon,
            demand.rowwise,
            demand.columnwise,
            demand.bias_grad,
            demand.moments,
            demand.active,
        )
        rowwise = self._matrix(codes, scales)
        return Operands(rowwise, self._matrix(transposed, column_scales), bias_grad)

    def _matrix(self, codes: torch.Tensor | None, scales: torch.Tensor | None) -> Fp8Matrix | None:
        if codes is None or scales is None:
            return None
        return Fp8Matrix(codes, scales, self.matrix_format)

    def __repr__(self) -> str:
        return f"BlockQuantizer({FP8_NAMES[self.format]}, {self.dimensions}D)"


IDENTITY = IdentityQuantizer()
_NATIVE = (IdentityQuantizer, DelayedQuantizer, CurrentQuantizer, BlockQuantizer)


def pad(x: torch.Tensor, padding: int) -> torch.Tensor:
    """Add zero tokens; they change no result, and their own are cut off again."""
    if not padding:
        return x
    return torch.nn.functional.pad(x.reshape(-1, x.shape[-1]), (0, 0, 0, padding))


SIX = ("input", "weight", "grad_output", "output", "dgrad", "wgrad")


class GemmQuantizers:
    """The six quantizers of one Matmul: three before its GEMMs, three after them.

    One that is not given is the identity.
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
        self.fp8 = isinstance(input, Fp8Quantizer)
        self.wrapped = False  # somebody looks at these GEMMs
        six = (self.input, self.weight, self.grad_output, self.output, self.dgrad, self.wgrad)
        # They do nothing but call `_C`, the same for every tensor of a shape.
        self.native = all(type(quantizer) in _NATIVE for quantizer in six)
        # Of fprop, dgrad, wgrad: the short accumulator of FP8 tensor cores is for fprop only.
        self.fast_accumulation = (self.fp8, False, False)

    def replaced(self, changed: Mapping[str, Quantizer]) -> GemmQuantizers:
        """The same, or a copy in which those of some names are others that look at its GEMMs."""
        own = {name: getattr(self, name) for name in SIX}
        changed = {name: q for name, q in changed.items() if q is not own[name]}
        if not changed:
            return self
        copy = GemmQuantizers(**{**own, **changed})
        copy.fp8 = self.fp8
        copy.fast_accumulation = self.fast_accumulation
        copy.wrapped = self.wrapped or any(q is not IDENTITY for q in changed.values())
        return copy

    def repeating(self, scales: torch.Tensor | None) -> GemmQuantizers:
        """Those of a forward that repeats another; gradients are there for the first time.

        Args:
            scales: fp32 `[3]` of input, weight and output in that forward, under delayed scaling.
        """
        first = [None if scales is None else scales[i : i + 1] for i in range(2)]
        again = GemmQuantizers(
            self.input.repeating(first[0]),
            self.weight.repeating(first[1]),
            self.grad_output,
            self.output,
            self.dgrad,
            self.wgrad,
        )
        again.fp8, again.wrapped = self.fp8, self.wrapped
        again.fast_accumulation = self.fast_accumulation
        return again


HIGH_PRECISION_GEMM = GemmQuantizers()
