"""`Float8BlockScaling`: every block of a tensor has a scale from its own largest magnitude."""

from __future__ import annotations

from collections.abc import Hashable
from operator import index
from typing import Any

import torch

from transformer_engine.common.recipe import Float8BlockScaling, QParams
from transformer_engine.pytorch.dtypes import E4M3, FP8_NAMES
from transformer_engine.pytorch.fp8.casts.operands import Fp8Matrix, OperandRequest, Operands
from transformer_engine.pytorch.fp8.casts.quantizers import Fp8Quantizer, GemmQuantizers
from transformer_engine.pytorch.fp8.recipes.base import GemmColumns, RecipeRules, register
from transformer_engine.pytorch.kernels.quantize_blocks import quantize_blocks
from transformer_engine.pytorch.scale_layout import ScaleLayout, block_layout


class BlockQuantizer(Fp8Quantizer, native=True):
    """Scales from the blocks of the tensor itself, separately along rows and along columns.

    Args:
        format: value of `DType`.
        dimensions: of a block: 1 (1 x 128 values along the axis that a GEMM sums over) or 2
            (128 x 128 values).
        power_of_2: round scales down to powers of two.
        epsilon: lower bound of the amax.
    """

    scaling = "fp8_block_scaling"
    shard_rows = 128

    def __init__(
        self, format: int, dimensions: int, power_of_2: bool = True, epsilon: float = 0.0
    ) -> None:
        # Dynamo may have made a symbol of the number; `index` returns its value.
        self.dimensions = index(dimensions)
        self.layout = block_layout(self.dimensions)
        super().__init__(format)
        self.power_of_2 = power_of_2
        self.epsilon = epsilon

    def constants(self) -> tuple[Any, ...] | None:
        """The arguments; None if epsilon is not its default."""
        alike = (self.format, self.dimensions, self.power_of_2)
        return alike if self.epsilon == 0.0 else None

    def module_settings(self) -> tuple[Any, ...]:
        """The arguments; empty for subclasses."""
        if type(self) not in (BlockQuantizer, self.public_class):
            return ()
        rounds = bool(self.power_of_2)
        return self.scaling, self.format, self.dimensions, rounds, repr(float(self.epsilon))

    @property
    def cache_key(self) -> Hashable:
        """Equal for equal blocks and rounding."""
        return (self.scaling, self.dimensions, self.power_of_2, self.epsilon)

    def operands(self, x: torch.Tensor, request: OperandRequest) -> Operands:
        """Find the scales of all blocks and cast, in one pass."""
        codes, scales, transposed, column_scales, bias_grad = quantize_blocks(
            x,
            self.matrix_format,
            self.power_of_2,
            self.epsilon,
            request.rowwise,
            request.columnwise,
            request.bias_grad,
            request.moments,
            request.active,
        )
        rowwise = self._matrix(codes, scales)
        return Operands(rowwise, self._matrix(transposed, column_scales), bias_grad)

    def of_shards(self, group: Any) -> BlockQuantizer:
        """The quantizer itself: no block has rows of two ranks."""
        return self

    def _matrix(self, codes: torch.Tensor | None, scales: torch.Tensor | None) -> Fp8Matrix | None:
        if codes is None or scales is None:
            return None
        return Fp8Matrix(codes, scales, self.matrix_format)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({FP8_NAMES[self.format]}, {self.dimensions}D)"


@register(Float8BlockScaling)
class BlockRules(RecipeRules):
    """The rules of `Float8BlockScaling`."""

    scaling = BlockQuantizer.scaling

    def gemm_quantizers(
        self, recipe: Float8BlockScaling, columns: GemmColumns | None
    ) -> GemmQuantizers:
        """Casts as the recipe says for each kind of tensor; the GEMMs sum in fp32."""

        def quantizer(parameters: QParams, dimensions: int, format: int) -> BlockQuantizer:
            power_of_2 = parameters.power_2_scale and not recipe.use_f32_scales
            return BlockQuantizer(format, dimensions, power_of_2, parameters.epsilon())

        forward, backward = self.forward_format(recipe), self.backward_format(recipe)
        of_grad = recipe.fp8_quant_bwd_grad, recipe.grad_block_scaling_dim
        gemms = GemmQuantizers(
            input=quantizer(recipe.fp8_quant_fwd_inp, recipe.x_block_scaling_dim, forward),
            weight=quantizer(recipe.fp8_quant_fwd_weight, recipe.w_block_scaling_dim, forward),
            grad_output=quantizer(*of_grad, backward),
            backward_override=recipe.backward_override,
        )
        gemms.fast_accumulation = (False, False, False)
        return gemms

    def weight_layout(self, recipe: Float8BlockScaling) -> ScaleLayout:
        """The layout in which weights are cast."""
        return block_layout(recipe.w_block_scaling_dim)

    def weight_settings(self, recipe: Float8BlockScaling) -> dict[str, Any]:
        """The settings with which weights are cast."""
        weight: Any = self.gemm_quantizers(recipe, None).weight
        return {"power_of_2": weight.power_of_2, "epsilon": weight.epsilon}

    def refusal_of_weights(self, recipe: Float8BlockScaling) -> str:
        """A weight that exists only in FP8 must have a transpose."""
        if self.weight_layout(recipe).transposes:
            return ""
        return (
            "expected w_block_scaling_dim=2, got 1: blocks of 1 x 128 values have no transpose, "
            "which the backward takes of a weight that is kept in FP8"
        )

    def what_if_quantizer(self, tensor: str, format: int) -> BlockQuantizer:
        """The cast of the default recipe, which only uses E4M3."""
        return BlockQuantizer(E4M3, 2 if tensor == "weight" else 1)
