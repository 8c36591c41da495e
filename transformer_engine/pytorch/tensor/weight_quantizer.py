"""`WeightQuantizer`: how a weight that is kept in FP8 is written, with one scale or in blocks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch.dtypes import E4M3
from transformer_engine.pytorch.fp8.casts.operands import (
    Fp8Matrix,
    OperandRequest,
    Operands,
    scale_pair,
)
from transformer_engine.pytorch.fp8.casts.quantizers import Fp8Quantizer
from transformer_engine.pytorch.kernels.amax import amax, current_scales_many
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.kernels.quantize import quantize
from transformer_engine.pytorch.scale_layout import ScaleLayout, layout_of
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
)
from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Tensor,
)
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor, rowwise_of
from transformer_engine.pytorch.tensor.writing import ShardRanks

_LARGEST = 448.0
_HALF_A_STEP = 2.0**-8  # and some room, of bf16, the coarsest of nominal dtypes
_ROUNDED = 1.01  # a value of the nominal dtype may lie that much above what it was in FP8


class WeightQuantizer(Fp8Quantizer):
    """Quantises a weight with the scales of its own values, under every recipe.

    Delayed scaling spares activations the pass that finds the largest magnitude before the cast. A
    weight is written once a step, by an optimizer that reads all of it anyway, and what a scale of
    the past clips or flushes to zero is lost for good: there is no other copy.
    """

    pickles = True
    writes_weights = True
    label: str  # which parameter of which layer this is
    family: str | None = None  # of the recipes that may use the weight; None: all with its layout
    made_for: str  # these recipes, for messages
    ranks: ShardRanks | None = None  # that have pieces of the weight, where this writes one

    @staticmethod
    def for_layout(layout: ScaleLayout, **settings: Any) -> WeightQuantizer:
        """What writes weights of a layout; the settings are those of its class."""
        kind = BlockWeightQuantizer if layout.in_blocks else TensorWeightQuantizer
        return kind(**settings)

    @staticmethod
    def writing(weight: QuantizedTensor) -> WeightQuantizer:
        """What writes a weight; where users made it without one of these, the usual one."""
        own: Any = weight._quantizer
        if getattr(own, "writes_weights", False):
            return own
        return WeightQuantizer.for_layout(layout_of(weight._format))

    def labelled(self, label: str) -> WeightQuantizer:
        """The same under another label: copies of a weight share this one."""
        other = copy.copy(self)
        other.label = label
        return other

    def over(self, ranks: ShardRanks | None) -> WeightQuantizer:
        """The same, for a piece that these ranks share; None: for the whole."""
        other = copy.copy(self)
        other.ranks = ranks
        return other

    def holding(
        self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
    ) -> QuantizedTensor:
        """A weight of these codes, under a nominal dtype."""
        raise NotImplementedError

    def unwritten(self, like: torch.Tensor) -> QuantizedTensor:
        """A weight of the shape, nominal dtype and device of `like`, of undefined values."""
        codes = torch.empty_like(like, dtype=torch.uint8)
        shape, dtype = self.layout.scale_shape(*codes.shape), self.layout.scale_dtype
        return self.holding(codes, codes.new_empty(shape, dtype=dtype), like.dtype)

    def restored(
        self, values: torch.Tensor, scales: torch.Tensor | None, nominal: torch.dtype
    ) -> Fp8Matrix:
        """The cast of `values` `[out, in]`, with earlier scales where it restores the values.

        Then they are those of a state dict, and get the codes that they had. What has been edited
        since, or was never in FP8, is cast with the scales of its own values.

        Args:
            values: `[out, in]`.
            scales: None for those of the values.
            nominal: dtype of the weight, to which the values may have been rounded.
        """
        raise NotImplementedError

    def with_scales(self, values: torch.Tensor, scales: torch.Tensor) -> Fp8Matrix:
        """The cast of `values` `[out, in]` with these scales, as they lie in a weight."""
        raise NotImplementedError


class TensorWeightQuantizer(WeightQuantizer, Float8CurrentScalingQuantizer):
    """One scale for the weight.

    Args:
        family: `"delayed"` or `"current"`, the recipes that may use the weight; None for both.
        power_of_2: round scales down to powers of two.
        epsilon: least amax.
        margin: scales are divided by `2 ** margin`; a negative one is taken as 0.
        label: see the base class.
    """

    def __init__(
        self,
        family: str | None = None,
        power_of_2: bool = False,
        epsilon: float = 0.0,
        margin: int = 0,
        label: str = "",
    ) -> None:
        Float8CurrentScalingQuantizer.__init__(
            self, E4M3, columnwise=False, force_pow_2_scales=power_of_2, amax_epsilon=epsilon
        )
        self.family = family
        self.made_for = f"{family or 'per-tensor'} scaling"
        # Larger scales clip the largest values, and here every write would clip them once more.
        self.margin = max(margin, 0)
        self.label = label

    def __reduce__(self) -> Any:
        own = (self.family, self.power_of_2, self.epsilon, self.margin, self.label)
        return TensorWeightQuantizer, own

    def holding(
        self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
    ) -> Float8Tensor:
        """A weight of these codes."""
        return Float8Tensor(codes.shape, dtype, codes, scales, self.format, quantizer=self)

    def operands(self, x: torch.Tensor, request: OperandRequest) -> Operands:
        """Find the scale, then cast."""
        return self.cast(x, self.scales_of([amax(x)])[0], request)

    @property
    def rule(self) -> tuple[Any, ...]:
        """Quantizers with an equal one have equal scales for equal magnitudes."""
        return self.format, self.power_of_2, self.epsilon, self.margin

    def scales_of(self, largest: list[torch.Tensor]) -> list[torch.Tensor]:
        """Pairs fp32 `[2]` = {1/scale, scale}, one for each of these magnitudes, fp32 `[1]`."""
        found = current_scales_many(largest, self.format, self.power_of_2, self.epsilon)
        if self.margin:
            factor = 2.0**self.margin
            found = [torch.cat([scales[:1] * factor, scales[1:] / factor]) for scales in found]
        return found

    def restored(
        self, values: torch.Tensor, scales: torch.Tensor | None, nominal: torch.dtype
    ) -> Fp8Matrix:
        """The cast of `values`, see the base class; all ranks decide alike."""
        known = None if scales is None or scales.numel() != 2 else scales.to(values.device)
        largest = amax(values)
        differs = torch.ones_like(largest)
        if known is not None:
            matrix = self.with_scales(values, known)
            differs = differences(values, matrix, nominal).any().to(largest.dtype).view(1)
        if self.ranks is not None:
            found = self.ranks.reduce(torch.cat([largest, differs]), self.label)
            largest, differs = found.split(1)
        chosen = self.scales_of([largest])[0]
        if known is not None:
            inverse, scale = known
            holds = (scale > 0) & (largest * scale <= _LARGEST * _ROUNDED) & (differs == 0)
            holds &= (inverse * scale - 1).abs() < _ROUNDED - 1
            chosen = torch.where(holds, known, chosen)
        return self.with_scales(values, chosen)

    def with_scales(self, values: torch.Tensor, scales: torch.Tensor) -> Fp8Matrix:
        """The cast with a pair of scales, see the base class."""
        return self.cast(values, scales, OperandRequest(self, True, False)).rowwise  # type: ignore[return-value]


class BlockWeightQuantizer(WeightQuantizer, Float8BlockQuantizer):
    """A scale for each 128 x 128 values: the one kind of block that a transpose leaves whole.

    Args:
        power_of_2: round scales down to powers of two.
        epsilon: least amax.
        label: see the base class.
    """

    made_for = "block scaling"

    def __init__(self, power_of_2: bool = True, epsilon: float = 0.0, label: str = "") -> None:
        Float8BlockQuantizer.__init__(
            self,
            E4M3,
            rowwise=True,
            columnwise=False,
            amax_epsilon=epsilon,
            force_pow_2_scales=power_of_2,
        )
        self.label = label

    def __reduce__(self) -> Any:
        return BlockWeightQuantizer, (self.power_of_2, self.epsilon, self.label)

    def holding(
        self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
    ) -> Float8BlockwiseQTensor:
        """A weight of these codes."""
        facts = {"dtype": dtype, "fp8_dtype": self.dtype, "is_2D_scaled": True, "quantizer": self}
        return Float8BlockwiseQTensor.assembled(codes.shape, (codes, scales, None, None), facts)

    def restored(
        self, values: torch.Tensor, scales: torch.Tensor | None, nominal: torch.dtype
    ) -> Fp8Matrix:
        """The cast of `values`, see the base class; each block decides for itself."""
        matrix: Any = self.operands(values, OperandRequest(self, True, False)).rowwise
        if scales is None or scales.numel() != matrix.scales.numel():
            return matrix
        old_scales = scales.to(values.device).view(matrix.scales.shape)
        run, scale = self.layout.run, old_scales.reciprocal()
        largest = largest_of_blocks(values, old_scales.shape, run)
        holds = (old_scales > 0) & (scale > 0) & (largest * scale <= _LARGEST * _ROUNDED)
        tried = self.with_scales(values, torch.where(holds, old_scales, matrix.scales))
        differs = largest_of_blocks(
            differences(values, tried, nominal).float(), old_scales.shape, run
        )
        return self.with_scales(values, torch.where(differs == 0, tried.scales, matrix.scales))

    def with_scales(self, values: torch.Tensor, scales: torch.Tensor) -> Fp8Matrix:
        """The cast with the inverse scales of all blocks, see the base class."""
        each = self.layout.spread(scales.reciprocal(), *values.shape)
        one = torch.ones(2, dtype=torch.float32, device=values.device)
        codes = quantize(values.float() * each, E4M3, None, None, one, True, False, None)[0]
        assert codes is not None
        return Fp8Matrix(codes, scales, self.layout.code(E4M3))


def differences(values: torch.Tensor, matrix: Fp8Matrix, nominal: torch.dtype) -> torch.Tensor:
    """Where a matrix is not what values were before they were rounded to `nominal`, or to bf16.

    Other values than those of such codes are further away from the next code, almost all of them.
    """
    both = [torch.finfo(dtype) for dtype in (values.dtype, nominal)]
    least = max([limits.smallest_normal * limits.eps / 2 for limits in both])  # of subnormals
    found = dequantize(matrix.codes, matrix.format, matrix.scales, torch.float32)
    bound = values.abs().float().mul_(_HALF_A_STEP).add_(least)
    none = values.isnan() & found.isnan()
    return ~(found.sub_(values).abs_() <= bound) & ~none


def is_cast_of(weight: QuantizedTensor, values: torch.Tensor) -> bool:
    """Whether a weight is what casting `values` makes; the host waits for the device.

    A piece has the scale of the whole weight, so the scales of the weight are tried first.
    """
    writer, held = WeightQuantizer.writing(weight), rowwise_of(weight)
    assert held is not None
    scales = held.scales if held.layout.in_blocks else scale_pair(held.scales)
    if torch.equal(writer.with_scales(values, scales).codes, held.codes):
        return True
    made: Any = writer.operands(values, OperandRequest(writer, True, False)).rowwise
    return torch.equal(made.codes, held.codes) and torch.equal(made.scales, held.scales)


def largest_of_blocks(values: torch.Tensor, grid: Sequence[int], side: int) -> torch.Tensor:
    """fp32 magnitudes, one for each block and zero for what rounding up added; no NaN."""
    rows, cols = values.shape
    whole = values.new_zeros((grid[0] * side, grid[1] * side), dtype=torch.float32)
    whole[:rows, :cols] = values.abs().nan_to_num(nan=0.0, posinf=torch.inf)
    return whole.view(grid[0], side, grid[1], side).amax((1, 3))


torch.serialization.add_safe_globals([TensorWeightQuantizer, BlockWeightQuantizer])
