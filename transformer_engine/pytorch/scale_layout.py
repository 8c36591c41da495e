"""`ScaleLayout`: which scale of an FP8 matrix belongs to which values.

A matrix has one scale for all values, or a scale for each block of values, in one of two shapes of
blocks. `csrc/core/scale_blocks.h` is the same table for kernels. `_C` takes the element type and
the layout of a matrix as one number, which only this file makes and reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ELEMENTS = 16  # a bound on the number of element types


@dataclass(frozen=True)
class ScaleLayout:
    """Which values of a `[rows, cols]` matrix share a scale, and where its scales lie.

    Attributes:
        number: number of the layout in `_C`.
        block: rows and columns of a block of values that share a scale; None if all values do.
        scale_dtype: dtype of the scales in memory.
        columns_first: whether the grid of the blocks' scales is stored transposed.
        scale_multiples: the sizes of the stored grid are rounded up to multiples of these.

    >>> ROWS.scale_shape(20, 300), SQUARES.scale_shape(20, 300)
    ((3, 20), (1, 4))
    """

    number: int
    block: tuple[int, int] | None = None
    scale_dtype: torch.dtype = torch.float32
    columns_first: bool = False
    scale_multiples: tuple[int, int] = (1, 1)

    @property
    def in_blocks(self) -> bool:
        """Whether each block has a scale, which a GEMM applies while it sums in fp32."""
        return self.block is not None

    @property
    def dimensions(self) -> int:
        """Whether blocks are 1D or 2D: 1 or 2; 0 if there is one scale."""
        return 0 if self.block is None else 1 + (self.block[0] > 1)

    @property
    def transposes(self) -> bool:
        """Whether transposing codes and scales gives a matrix of the same layout.

        If not, the row-wise and the column-wise form of an operand are two casts, whose values
        differ.
        """
        return self.block is None or self.block[0] == self.block[1]

    @property
    def fast_accumulation(self) -> bool:
        """Whether a GEMM may keep its sums in the tensor cores' accumulator of less precision."""
        return self.block is None

    @property
    def run(self) -> int:
        """How many values along a row share a scale; 0 if all values do."""
        return 0 if self.block is None else self.block[1]

    def multiplies(self, other: ScaleLayout) -> bool:
        """Whether one GEMM takes matrices of these two layouts.

        Both must have the same `run`, because the GEMM sums over runs. If both are in blocks, one
        of them must also have blocks of a single row, which `_C` checks.
        """
        return self.run == other.run

    def code(self, element: int) -> int:
        """The number that `_C` takes for this layout with an element type, a value of `DType`."""
        return element + _ELEMENTS * self.number

    def scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """The shape of `{1/scale, scale}`, or of the grid of the blocks' inverse scales."""
        if self.block is None:
            return (2,)
        grid = -(-rows // self.block[0]), -(-cols // self.block[1])
        first, last = grid[::-1] if self.columns_first else grid
        by, to = self.scale_multiples
        return -(-first // by) * by, -(-last // to) * to

    def spread(self, scales: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
        """The inverse scale of each value, `[rows, cols]`; `[1]` if there is one scale."""
        if self.block is None:
            return scales[:1]
        height, width = self.block
        grid = scales.t() if self.columns_first else scales
        grid = grid[: -(-rows // height), : -(-cols // width)]
        each = grid[:, None, :, None].expand(-1, height, -1, width)
        return each.reshape(grid.shape[0] * height, grid.shape[1] * width)[:rows, :cols]

    def __str__(self) -> str:
        return f"FP8 in {self.dimensions}D blocks" if self.in_blocks else "FP8"


WHOLE = ScaleLayout(0)
ROWS = ScaleLayout(1, (1, 128), columns_first=True, scale_multiples=(1, 4))
SQUARES = ScaleLayout(2, (128, 128), scale_multiples=(1, 4))
LAYOUTS = {layout.number: layout for layout in (WHOLE, ROWS, SQUARES)}


def block_layout(dimensions: int) -> ScaleLayout:
    """The layout that `block_scaling_dim` names.

    Raises:
        ValueError: a number other than 1 and 2.
    """
    if dimensions not in (1, 2):
        raise ValueError(f"[quantizer] expected blocks of 1 or 2 dimensions, got {dimensions}")
    return SQUARES if dimensions == 2 else ROWS


def layout_of(code: int) -> ScaleLayout:
    """The layout of a matrix with this format of `_C`, see `ScaleLayout.code`.

    Raises:
        ValueError: there is no such format.
    """
    found = LAYOUTS.get(code // _ELEMENTS)
    if found is None:
        raise ValueError(f"[quantizer] expected a format of FP8 matrices, got {code}")
    return found


def element_of(code: int) -> int:
    """The element type (a value of `DType`) of a matrix with this format of `_C`."""
    return code % _ELEMENTS
