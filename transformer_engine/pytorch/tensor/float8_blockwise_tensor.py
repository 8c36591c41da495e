"""`Float8BlockwiseQTensor`: FP8 codes whose blocks have scales, and the quantizer that makes it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from transformer_engine.pytorch.dtypes import FP8_NAMES, DType
from transformer_engine.pytorch.fp8.casts.operands import Fp8Matrix, OperandRequest, Operands, Side
from transformer_engine.pytorch.fp8.casts.quantizers import Quantizer
from transformer_engine.pytorch.fp8.recipes.blocks import BlockQuantizer
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.kernels.shapes import matrix_shape
from transformer_engine.pytorch.kernels.transpose import transpose_blocks
from transformer_engine.pytorch.scale_layout import block_layout
from transformer_engine.pytorch.tensor.making import FindsScales, TensorMaking
from transformer_engine.pytorch.tensor.quantized_tensor import Parts
from transformer_engine.pytorch.tensor.shards import ShardableTensor
from transformer_engine.pytorch.tensor.writing import ranks_of


class Float8BlockwiseQTensor(ShardableTensor):
    """FP8 codes under a nominal dtype, with an inverse scale for every block.

    The tensor is read as `[rows, cols]`, where cols is the last size. It has up to two sides:
    row-wise codes, and column-wise codes, which are transposed. With 1 x 128 blocks each side has
    its own scales, so the values of the two sides differ; `dequantize` gives those of the row-wise
    side where there is one.

    Args:
        shape: the shape of the tensor.
        dtype: nominal dtype, which `dequantize` returns by default.
        rowwise_data: uint8 codes of that shape, or None.
        rowwise_scale_inv: fp32, see `ScaleLayout.scale_shape`.
        columnwise_data: uint8 codes `[cols, rows]`, or None.
        columnwise_scale_inv: fp32, the inverse scales of the column-wise codes.
        fp8_dtype: `DType.kFloat8E4M3` or `DType.kFloat8E5M2`, or torch's dtype of that name.
        is_2D_scaled: blocks have 128 x 128 values, not 1 x 128.
        quantizer: quantises values that are written in place.

    Raises:
        ValueError: both sides are missing.

    >>> import torch
    >>> quantizer = Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False)
    >>> quantizer(torch.tensor([[1.0, 448.0]])).dequantize()
    tensor([[  1., 448.]])
    """

    part_names = (
        "_rowwise_data",
        "_rowwise_scale_inv",
        "_columnwise_data",
        "_columnwise_scale_inv",
    )

    fact_names = (*ShardableTensor.fact_names, "is_2D_scaled")

    _rowwise_data: torch.Tensor | None
    _rowwise_scale_inv: torch.Tensor | None
    _columnwise_data: torch.Tensor | None
    _columnwise_scale_inv: torch.Tensor | None
    _is_2D_scaled: bool

    def __new__(
        cls,
        shape: torch.Size,
        dtype: torch.dtype,
        *,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        fp8_dtype: DType | torch.dtype | int,
        is_2D_scaled: bool,
        quantizer: Quantizer | None = None,
    ) -> Float8BlockwiseQTensor:
        """Wrap codes."""
        some = rowwise_data if rowwise_data is not None else columnwise_data
        if some is None:
            raise ValueError(
                "[Float8BlockwiseQTensor] expected row-wise or column-wise data, got neither"
            )
        self = cls.wrap(torch.Size(shape), dtype, some)
        self._rowwise_data, self._rowwise_scale_inv = rowwise_data, rowwise_scale_inv
        self._columnwise_data, self._columnwise_scale_inv = columnwise_data, columnwise_scale_inv
        self._fp8_dtype = DType.of(fp8_dtype)
        self._is_2D_scaled = is_2D_scaled
        self._format = block_layout(2 if is_2D_scaled else 1).code(int(self._fp8_dtype))
        self._quantizer = quantizer
        return self

    @classmethod
    def assembled(
        cls, shape: torch.Size, parts: Parts, facts: Mapping[str, Any]
    ) -> Float8BlockwiseQTensor:
        """Make a tensor of `parts` and `facts`, such as those of another tensor."""
        named = {name[1:]: part for name, part in zip(cls.part_names, parts, strict=True)}
        return cls(shape, **named, **facts)  # type: ignore[arg-type]

    @classmethod
    def part_shapes(
        cls, shape: torch.Size, facts: Mapping[str, Any]
    ) -> Sequence[Sequence[tuple[int, ...]]]:
        """The shapes that each part of a tensor of this shape may have."""
        layout = block_layout(2 if facts["is_2D_scaled"] else 1)
        rows, cols = shape[:-1].numel(), shape[-1] if shape else 1
        grids = layout.scale_shape(rows, cols), layout.scale_shape(cols, rows)
        return (shape,), (grids[0],), ((cols, rows),), (grids[1],)

    @classmethod
    def from_operands(
        cls, operands: Operands, like: torch.Tensor, quantizer: Quantizer | None
    ) -> Float8BlockwiseQTensor:
        """Wrap operands that a quantizer has made for GEMMs as a tensor."""
        rowwise, *others = _parts(operands.rowwise, operands.columnwise)
        some: Any = operands.columnwise if rowwise is None else operands.rowwise
        facts = {"fp8_dtype": some.element, "is_2D_scaled": some.layout.dimensions == 2}
        return cls.assembled(
            like.shape,
            [None if rowwise is None else rowwise.view(like.shape), *others],
            {"dtype": like.dtype, "quantizer": quantizer, **facts},
        )

    @property
    def facts(self) -> dict[str, Any]:
        """What `assembled` needs beside the parts."""
        return {**super().facts, "is_2D_scaled": self._is_2D_scaled}

    @property
    def scales(self) -> torch.Tensor:
        """fp32, the inverse scales of the row-wise side where it is there."""
        side = self.side(False) or self.side(True)
        assert side is not None
        return side.scales

    def side(self, columnwise: bool) -> Fp8Matrix | None:
        """One side as an operand of a GEMM; None where that side is missing."""
        codes, scales = self.parts[2:] if columnwise else self.parts[:2]
        if codes is None or scales is None:
            return None
        return Fp8Matrix(codes.contiguous(), scales, self._format)

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantised, in fp32, fp16 or bf16."""
        side = self.side(False) or self.side(True)
        assert side is not None
        found = dequantize(side.codes, side.format, side.scales, dtype)
        rows = found if self._rowwise_data is not None else found.t().contiguous()
        return rows.view(self.shape)

    def quantized(self, plain: torch.Tensor) -> Parts:
        """The parts that the quantizer makes of other values of this shape."""
        sides = (self._rowwise_data is not None, self._columnwise_data is not None)
        assert self._quantizer is not None
        made = self._quantizer.operands(plain, OperandRequest(self._quantizer, *sides))
        return _parts(made.rowwise, made.columnwise)

    def viewed(self, shape: Sequence[int]) -> torch.Tensor:
        """`view`; one that cuts blocks is dequantised, with a warning."""
        size = torch.empty(self.shape, device="meta").view(shape).shape
        if ranks_of(self) is not None and len(size) == 1:  # `fully_shard` holds it, unread
            return self.with_parts(self.parts, size)
        if not size or not self.ndim or size[-1] != self.shape[-1]:
            warnings.warn(
                f"[Float8BlockwiseQTensor] expected a view with the last size "
                f"{tuple(self.shape)[-1:]} kept, got {tuple(size)}, which cuts blocks: it is "
                "dequantised",
                stacklevel=3,
            )
            return self.plain_values().view(shape)
        rowwise, *others = self.parts
        parts = [None if rowwise is None else rowwise.view(size), *others]
        return self.with_parts(parts, size)

    def get_usages(self) -> dict[str, bool]:
        """Which sides the tensor has."""
        return {
            "rowwise": self._rowwise_data is not None,
            "columnwise": self._columnwise_data is not None,
        }

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Make or drop sides; a missing side can be made of square blocks only, by transposing."""
        wanted = {"rowwise": rowwise_usage, "columnwise": columnwise_usage}
        left = {n: own if wanted[n] is None else wanted[n] for n, own in self.get_usages().items()}
        if not any(left.values()):
            raise RuntimeError(
                "[update_usage] expected row-wise or column-wise codes to stay, got neither"
                f" ({self.label})"
            )
        for columnwise, name in enumerate(left):
            if left[name] and self.side(bool(columnwise)) is None:
                self._transpose_side(bool(columnwise))
        for name, stays in left.items():
            if not stays:
                setattr(self, f"_{name}_data", None)
                setattr(self, f"_{name}_scale_inv", None)

    def _transpose_side(self, columnwise: bool) -> None:
        """Make a side by transposing the other one."""
        if not self._is_2D_scaled:
            name = "column-wise" if columnwise else "row-wise"
            raise RuntimeError(
                f"[update_usage] expected {name} codes at hand, got none: blocks of 1 x 128 are"
                f" scaled for each side; quantise the values again ({self.label})"
            )
        other = self.side(not columnwise)
        assert other is not None
        codes, scales = transpose_blocks(other.codes, other.scales)
        name = "columnwise" if columnwise else "rowwise"
        setattr(self, f"_{name}_data", codes if columnwise else codes.view(self.shape))
        setattr(self, f"_{name}_scale_inv", scales)

    def description(self) -> str:
        """What `repr` says beside the values."""
        return f"fp8_dtype={FP8_NAMES[int(self._fp8_dtype)]}, is_2D_scaled={self._is_2D_scaled}"


torch.serialization.add_safe_globals([Float8BlockwiseQTensor])


def _parts(rowwise: Side | None, columnwise: Side | None) -> Parts:
    found: list[torch.Tensor | None] = []
    for side in (rowwise, columnwise):
        there = isinstance(side, Fp8Matrix)
        found += [side.codes, side.scales] if there else [None, None]  # type: ignore[union-attr]
    return tuple(found)


class Float8BlockQuantizer(FindsScales, TensorMaking, BlockQuantizer):
    """Quantises blocks with the scales of the tensor in hand; calling it gives a tensor.

    Args:
        fp8_dtype: `DType.kFloat8E4M3` or `DType.kFloat8E5M2`, or torch's dtype of that name.
        rowwise: make row-wise codes.
        columnwise: make column-wise codes, which are transposed.
        amax_epsilon: smaller amaxes are raised to this value.
        force_pow_2_scales: round scales down to powers of two.
        block_scaling_dim: 1 for blocks of 1 x 128 values, 2 for 128 x 128.
    """

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype | int,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        self.dtype = DType.of(fp8_dtype)
        super().__init__(int(self.dtype), block_scaling_dim, force_pow_2_scales, amax_epsilon)
        self.set_usage(rowwise=rowwise, columnwise=columnwise)

    @property
    def block_scaling_dim(self) -> int:
        """1 or 2."""
        return self.dimensions

    def get_columnwise_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """The shape of the transposed codes, `(cols, rows)`."""
        rows, cols = matrix_shape(shape)
        return cols, rows

    def get_scale_shape(self, shape: Sequence[int], columnwise: bool) -> tuple[int, ...]:
        """The shape of the inverse scales of one side of a tensor."""
        rows, cols = matrix_shape(shape)
        sides = (cols, rows) if columnwise else (rows, cols)
        return self.layout.scale_shape(*sides)

    def is_quantizable(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor consists of whole blocks, so that parts of its tokens can, too."""
        rows, cols = matrix_shape(tensor.shape)
        run = self.layout.run
        return tensor.ndim >= 2 and rows % run == 0 and cols % run == 0

    def _made(self, plain: torch.Tensor) -> Float8BlockwiseQTensor:
        made = self.operands(plain, OperandRequest(self, self.rowwise_usage, self.columnwise_usage))
        return Float8BlockwiseQTensor.from_operands(made, plain, self)

    @classmethod
    def of(cls, quantizer: BlockQuantizer) -> Float8BlockQuantizer:
        """The public quantizer with the same cast as a quantizer of modules."""
        return cls(
            quantizer.format,
            rowwise=True,
            columnwise=True,
            amax_epsilon=quantizer.epsilon,
            force_pow_2_scales=quantizer.power_of_2,
            block_scaling_dim=quantizer.dimensions,
        )


BlockQuantizer.public_class = Float8BlockQuantizer
