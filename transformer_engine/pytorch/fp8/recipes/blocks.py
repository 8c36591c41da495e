"""`Float8BlockScaling`: every block of a tensor has the scale of its own largest magnitude."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from transformer_engine.pytorch.dtypes import FP8_NAMES
from transformer_engine.pytorch.fp8.operands import Demand, Fp8Matrix, Operands
from transformer_engine.pytorch.fp8.quantizers import Fp8Quantizer
from transformer_engine.pytorch.kernels.quantize_blocks import quantize_blocks
from transformer_engine.pytorch.scale_layout import block_layout


class BlockQuantizer(Fp8Quantizer, native=True):
    """Scales from the blocks of the tensor in hand, along rows and along columns on their own.

    Args:
        format: value of `DType`.
        dimensions: of a block: 1 (1 x 128 values along the axis that a GEMM sums over) or 2.
        power_of_2: round scales down to powers of two.
        epsilon: least amax.
    """

    scaling = "fp8_block_scaling"

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
