"""`WeightQuantizer`: how a weight that is kept in FP8 is written, with one scale or in blocks.

It also decides, when a state dict is loaded, whether the saved scales give the codes that a weight
had: then the restored weight is the same, bit for bit.
"""

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
_HALF_A_STEP = 2.0**-8  # bounds the relative error of rounding to bf16, the coarsest nominal dtype
_ROUNDED = 1.01  # rounding to the nominal dtype raises a value by less than this factor


class WeightQuantizer(Fp8Quantizer):
    """Quantises a weight with the scales of its own values, under every recipe.

    Delayed scaling takes an activation's scale from the past, and so saves the pass over memory
    that finds the amax before the cast. For a weight this would gain little and cost accuracy: it
    is written once a step, by an optimizer that reads all of it anyway, and values that an old
    scale clips or flushes to zero would be lost for good, because there is no other copy.
    """

    pickles = True
    writes_weights = True
    label: str  # which parameter of which layer this is
    family: str | None = None  # the recipes that may use the weight; None: all with its layout
    made_for: str  # the recipes in words, for messages
    ranks: ShardRanks | None = None  # if this writes a piece of a weight: who has the others

    @staticmethod
    def for_layout(layout: ScaleLayout, **settings: Any) -> WeightQuantizer:
        """The quantizer for weights of a layout; the settings are those of its class."""
        kind = BlockWeightQuantizer if layout.in_blocks else TensorWeightQuantizer
        return kind(**settings)

    @staticmethod
    def writing(weight: QuantizedTensor) -> WeightQuantizer:
        """The quantizer of a weight; a default one if users made the weight with another kind."""
        own: Any = weight._quantizer
        if getattr(own, "writes_weights", False):
            return own
        return WeightQuantizer.for_layout(layout_of(weight._format))

    def labelled(self, label: str) -> WeightQuantizer:
        """A copy with another label, because copies of a weight share this quantizer."""
        other = copy.copy(self)
        other.label = label
        return other

    def over(self, ranks: ShardRanks | None) -> WeightQuantizer:
        """A copy for a piece of a weight, whose pieces these ranks have; None: for the whole."""
        other = copy.copy(self)
        other.ranks = ranks
        return other

    def holding(
        self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
    ) -> QuantizedTensor:
        """A weight of these codes, under a nominal dtype."""
        raise NotImplementedError

    def unwritten(self, like: torch.Tensor) -> QuantizedTensor:
        """A weight of the shape, nominal dtype and device of `like`, with undefined values."""
        codes = torch.empty_like(like, dtype=torch.uint8)
        shape, dtype = self.layout.scale_shape(*codes.shape), self.layout.scale_dtype
        return self.holding(codes, codes.new_empty(shape, dtype=dtype), like.dtype)

    def restored(
        self, values: torch.Tensor, scales: torch.Tensor | None, nominal: torch.dtype
    ) -> Fp8Matrix:
        """The cast of `values` `[out, in]`, with saved scales if that reproduces the values.

        Values from the state dict of an FP8 weight so get the codes that they had. Values that were
        edited since, or never were in FP8, are cast with scales that follow from their amax.
        `nominal` is the dtype of the weight, to which the values may have been rounded.
        """
        raise NotImplementedError

    def with_scales(self, values: torch.Tensor, scales: torch.Tensor) -> Fp8Matrix:
        """The cast of `values` `[out, in]` with these scales, stored as in a weight."""
        raise NotImplementedError


class TensorWeightQuantizer(WeightQuantizer, Float8CurrentScalingQuantizer):
    """One scale for the weight.

    Args:
        family: `"delayed"` or `"current"`, the recipes that may use the weight; None for both.
        power_of_2: round scales down to powers of two.
        epsilon: smaller amaxes are raised to this value.
        margin: scales are divided by `2 ** margin`; a negative margin is taken as 0.
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
        # A negative margin clips the largest values, and here every write would clip them again.
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
        """What decides the scale of an amax: weights with equal rules are written by one kernel."""
        return self.format, self.power_of_2, self.epsilon, self.margin

    def scales_of(self, largest: list[torch.Tensor]) -> list[torch.Tensor]:
        """Pairs fp32 `[2]` = {1/scale, scale}, one for each of these amaxes, fp32 `[1]`."""
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
    """One scale for each block of 128 x 128 values; only such blocks can be transposed.

    For the arguments see `TensorWeightQuantizer`.
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
    """A mask of the values that cannot be those of the matrix, rounded to `nominal` or to bf16.

    The tolerance is much smaller than the distance between FP8 codes, so values that do not come
    from these codes are found, with few exceptions.
    """
    both = [torch.finfo(dtype) for dtype in (values.dtype, nominal)]
    least = max([limits.smallest_normal * limits.eps / 2 for limits in both])  # of subnormals
    found = dequantize(matrix.codes, matrix.format, matrix.scales, torch.float32)
    bound = values.abs().float().mul_(_HALF_A_STEP).add_(least)
    none = values.isnan() & found.isnan()
    return ~(found.sub_(values).abs_() <= bound) & ~none


def is_cast_of(weight: QuantizedTensor, values: torch.Tensor) -> bool:
    """Whether casting `values` gives this weight; the host waits for the device.

    The scales of the weight are tried first: a piece has that of the whole weight.
    """
    writer, held = WeightQuantizer.writing(weight), rowwise_of(weight)
    assert held is not None
    scales = held.scales if held.layout.in_blocks else scale_pair(held.scales)
    if torch.equal(writer.with_scales(values, scales).codes, held.codes):
        return True
    made: Any = writer.operands(values, OperandRequest(writer, True, False)).rowwise
    return torch.equal(made.codes, held.codes) and torch.equal(made.scales, held.scales)


def largest_of_blocks(values: torch.Tensor, grid: Sequence[int], side: int) -> torch.Tensor:
    """The fp32 amax of each block, without NaNs; 0 for blocks that only pad the grid of scales."""
    rows, cols = values.shape
    whole = values.new_zeros((grid[0] * side, grid[1] * side), dtype=torch.float32)
    whole[:rows, :cols] = values.abs().nan_to_num(nan=0.0, posinf=torch.inf)
    return whole.view(grid[0], side, grid[1], side).amax((1, 3))


torch.serialization.add_safe_globals([TensorWeightQuantizer, BlockWeightQuantizer])
