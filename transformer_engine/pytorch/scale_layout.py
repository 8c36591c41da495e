"""`ScaleLayout`: how the scales of an FP8 matrix belong to its values.

`csrc/core/scale_blocks.h` says the same to kernels. What crosses into `_C` is one number for the
element type and the layout of a matrix; it is made and read here alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ELEMENTS = 16  # more than there are element types


@dataclass(frozen=True)
class ScaleLayout:
    """Which values of a `[rows, cols]` matrix share a scale, and where its scales lie.

    Attributes:
        number: of the layout in `_C`.
        block: rows and columns of the values that share a scale; None where all values do.
        scale_dtype: of the scales in memory.
        columns_first: the grid of the blocks' scales is stored transposed.
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
        """Whether blocks have scales of their own, which a GEMM applies while it sums in fp32."""
        return self.block is not None

    @property
    def dimensions(self) -> int:
        """Of a block: 1 or 2; 0 where there is one scale."""
        return 0 if self.block is None else 1 + (self.block[0] > 1)

    @property
    def transposes(self) -> bool:
        """Whether the transposed codes, with their scales moved along, are another such matrix.

        Where this is False the two sides of an operand are two casts, with other values.
        """
        return self.block is None or self.block[0] == self.block[1]

    @property
    def fast_accumulation(self) -> bool:
        """Whether a GEMM may leave its sums in the short accumulator of the tensor cores."""
        return self.block is None

    @property
    def run(self) -> int:
        """How many values along a row share a scale; 0 where all values do."""
        return 0 if self.block is None else self.block[1]

    def multiplies(self, other: ScaleLayout) -> bool:
        """Whether one GEMM takes matrices of these two layouts: it sums over equal runs.

        Of two matrices in blocks one must have blocks of a single row, which `_C` checks.
        """
        return self.run == other.run

    def code(self, element: int) -> int:
        """What `_C` takes as the format of codes of this element type, a value of `DType`."""
        return element + _ELEMENTS * self.number

    def scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """The shape of the scales: `{1/scale, scale}`, or the inverse scales of all blocks."""
        if self.block is None:
            return (2,)
        grid = -(-rows // self.block[0]), -(-cols // self.block[1])
        first, last = grid[::-1] if self.columns_first else grid
        by, to = self.scale_multiples
        return -(-first // by) * by, -(-last // to) * to

    def spread(self, scales: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
        """The inverse scale of each value, `[rows, cols]`; `[1]` where there is one scale."""
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
    """The layout of a matrix whose format `_C` takes as this number.

    Raises:
        ValueError: there is no such format.
    """
    found = LAYOUTS.get(code // _ELEMENTS)
    if found is None:
        raise ValueError(f"[quantizer] expected a format of FP8 matrices, got {code}")
    return found


def element_of(code: int) -> int:
    """The element type of such a matrix, a value of `DType`."""
    return code % _ELEMENTS
