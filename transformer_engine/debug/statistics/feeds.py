"""Prepares tensors and their FP8 operands for the kernels that take statistics.

`cast` returns an object whose method `into` merges the statistics of a cast into a row: `Cast` if
the tensor has a single scale, `BlockCast` if it has a scale for each block, and `Scales` if the
tensor in high precision is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from transformer_engine.debug.mx import cast_to_mx, seen_along
from transformer_engine.debug.statistics.rows import WIDTH, Kind
from transformer_engine.debug.statistics.subscription import Source
from transformer_engine.pytorch.dtypes import E4M3, HIGH_PRECISION, TORCH_FP8
from transformer_engine.pytorch.fp8.casts.operands import Fp8Matrix, OperandRequest, scale_pair
from transformer_engine.pytorch.fp8.casts.quantizers import Fp8Quantizer
from transformer_engine.pytorch.fp8.recipes.base import rules_named
from transformer_engine.pytorch.fp8.recipes.current import CurrentQuantizer
from transformer_engine.pytorch.kernels.amax import current_scales
from transformer_engine.pytorch.kernels.moments import (
    CAST_MOMENTS_FIELDS,
    cast_moments,
    merge_rows,
)
from transformer_engine.pytorch.kernels.shapes import matrix_shape
from transformer_engine.pytorch.kernels.transpose import transpose
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor

_ROUNDINGS = 1 + 2.0**-22  # rounding errors of a scale, see `overflow_limit` in core/moments.h
MX = "mxfp8"  # never the recipe in use: its cast is always made for statistics alone
Amax = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TensorName:
    """The tensor of which statistics are taken.

    Attributes:
        layer: name of the layer.
        tensor: name of the tensor in the layer.
        amax: computes the amax over all ranks that have a shard of the tensor; None if this rank
            has the whole tensor.
    """

    layer: str
    tensor: str
    amax: Amax | None = None


def plain(x: torch.Tensor) -> torch.Tensor:
    """Return `x` detached, dequantised, contiguous and in a dtype that the kernels take."""
    x = x.detach()
    if isinstance(x, QuantizedTensor):
        x = x.dequantize()
    if x.dtype not in HIGH_PRECISION:
        x = x.float()
    return x.contiguous()


def blocks(x: torch.Tensor, source: Source, row: torch.Tensor, active: torch.Tensor | None) -> None:
    """Merge the largest dynamic range of a block of `x` into a row of kind `BLOCKS`."""
    magnitudes = plain(x).reshape(-1, x.shape[-1] if x.ndim else 1).abs().float()
    ranges = [_largest_range(magnitudes, source)]
    if source.both:
        ranges.append(_largest_range(magnitudes.t().contiguous(), source))
    found = [torch.full_like(ranges[0], x.numel()), torch.stack(ranges).amax()]
    _merge(Kind.BLOCKS, found, row, active)


def _largest_range(magnitudes: torch.Tensor, source: Source) -> torch.Tensor:
    """Return the largest dynamic range (log2 of max over non-zero min) of a block, float64.

    If blocks do not divide the tensor, it is padded with zeros, which do not count: the effect is
    that of smaller blocks at the end.
    """
    side = source.block
    if not magnitudes.numel():
        return magnitudes.new_zeros((), dtype=torch.float64)
    if source.dims == 1:
        flat = magnitudes.flatten()
        cut = functional.pad(flat, (0, -flat.numel() % side)).view(-1, side)
    else:
        rows, cols = [-(-size // side) for size in magnitudes.shape]
        missing = [-size % side for size in magnitudes.shape]
        whole = functional.pad(magnitudes, (0, missing[1], 0, missing[0]))
        tiles = whole.view(rows, side, cols, side)
        cut = tiles.transpose(1, 2).reshape(-1, side * side)
    top = cut.amax(dim=1)
    bottom = torch.where(cut == 0, torch.inf, cut).amin(dim=1)
    ranges = top.double().log2() - bottom.double().log2()
    return torch.where(top == 0, 0.0, ranges).amax()


@dataclass(frozen=True)
class Cast:
    """A tensor and its codes, with elements in the same order."""

    x: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    format: int

    def into(self, row: torch.Tensor, active: torch.Tensor | None, squared_error: bool) -> None:
        """Merge the statistics into a row of kind `CASTS`; squared errors only if requested."""
        fields = row[:CAST_MOMENTS_FIELDS]
        cast_moments(self.x, self.codes, self.scales, self.format, fields, active, squared_error)

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return self.x.numel()


@dataclass(frozen=True)
class Scales:
    """The scales of a parameter that is kept in FP8: no other statistic of its cast is known."""

    matrix: Fp8Matrix

    def into(self, row: torch.Tensor, active: torch.Tensor | None, squared_error: bool) -> None:
        """Merge the scales, and the number of elements, into a row of kind `CASTS`."""
        matrix = self.matrix
        inverses = matrix.layout.spread(matrix.scales, *matrix_shape(matrix.codes.shape)).double()
        found = [inverses.new_full((), float(self.numel)), *inverses.new_zeros(3)]
        _merge(Kind.CASTS, [*found, *_range(inverses)], row, active)

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return self.matrix.codes.numel()


@dataclass(frozen=True)
class BlockCast:
    """A matrix (transposed if column-wise), its codes, and the inverse scale of each element."""

    x: torch.Tensor
    codes: torch.Tensor
    inverses: torch.Tensor
    element: int

    def into(self, row: torch.Tensor, active: torch.Tensor | None, squared_error: bool) -> None:
        """Merge the statistics into a row of kind `CASTS`, fields as in `CastMoments`."""
        values = self.codes.contiguous().view(TORCH_FP8[self.element]).float()
        largest = torch.finfo(TORCH_FP8[self.element]).max * self.inverses * _ROUNDINGS
        x = self.x.float()
        found = [
            row.new_full((), float(self.numel)),
            ((x != 0) & (self.codes & 0x7F == 0)).sum(dtype=torch.float64),
            (x.abs() > largest.clamp(max=torch.finfo(torch.float32).max)).sum(dtype=torch.float64),
            (x.double() - (values * self.inverses).double()).square().sum(),
        ]
        _merge(Kind.CASTS, [*found, *_range(self.inverses.double())], row, active)

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return self.x.numel()


def _range(inverses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest non-zero value and the largest one."""
    if not inverses.numel():
        return inverses.new_full((), torch.inf), inverses.new_zeros(())
    return torch.where(inverses == 0, torch.inf, inverses).amin(), inverses.amax()


def _merge(
    kind: Kind, fields: Sequence[torch.Tensor], row: torch.Tensor, active: torch.Tensor | None
) -> None:
    """Merge float64 scalars, which are the first fields of a row of this kind, into `row`."""
    found = functional.pad(torch.stack([*fields]), (0, WIDTH - len(fields)))
    kinds = row.new_full((1,), kind, dtype=torch.int64)
    merge_rows(found.view(1, 1, WIDTH), kinds, row.view(1, WIDTH), active)


def cast(
    x: torch.Tensor | None,
    sides: tuple[Any, Any],
    source: Source,
    quantizer: Any,
    of: TensorName,
) -> Cast | BlockCast | Scales | str:
    """Return what to merge into a row of kind `CASTS`, or the reason why there is nothing.

    Args:
        x: the tensor in high precision, None for a parameter that is kept in FP8.
        sides: the operand that was made from `x` in the direction of the source, and the operand in
            the other direction.
        source: the source of the slot, which names the recipe and the direction.
        quantizer: the quantizer that made the operands.
        of: the name of the tensor.

    Raises:
        ValueError: a cast by the requested recipe cannot be reproduced from the tensor.
    """
    if x is not None:
        x = plain(x)
    current = getattr(quantizer, "scaling", "")
    if source.recipe and source.recipe != current:
        if x is None:
            return f"{source.recipe} needs the tensor in high precision, and it is kept in FP8"
        if source.recipe == MX:
            flat = seen_along(x, source.columnwise)
            return BlockCast(flat, *cast_to_mx(flat), E4M3)
        return _cast_again(x, source, _what_if(source, quantizer, of), of.amax)
    matrix = _matrix(sides[0], source.columnwise)
    if matrix is None:
        directions = ("columnwise", "rowwise") if source.columnwise else ("rowwise", "columnwise")
        said = f"the tensor is not quantised to FP8 ({directions[0]})"
        if _matrix(sides[1], not source.columnwise) is not None:
            name = "underflows%" if source.columnwise else "underflows%_columnwise"
            return f"{said}: no GEMM takes it so; one takes it {directions[1]}, see {name}"
        if current:
            return f"{said}: no GEMM in FP8 takes it, because a feature or the layer says so"
        return f"{said}; layers cast inside te.fp8_autocast(enabled=True)"
    if x is None:
        return Scales(matrix)
    if matrix.layout.in_blocks:
        return _block_cast(x, matrix, source)
    codes = transpose(matrix.codes) if source.columnwise else matrix.codes
    if codes.numel() != x.numel():  # the codes have rows of zeros at the end, padding for the GEMM
        codes = codes.reshape(-1)[: x.numel()]
    return Cast(x, codes.reshape(x.shape), scale_pair(matrix.scales), matrix.format)


def _matrix(side: Any, columnwise: bool) -> Fp8Matrix | None:
    if isinstance(side, Fp8Matrix):
        return side
    return side.side(columnwise) if isinstance(side, QuantizedTensor) else None


def _block_cast(x: torch.Tensor, matrix: Fp8Matrix, source: Source) -> BlockCast:
    flat = seen_along(x, source.columnwise)
    rows, cols = flat.shape  # codes may have further rows or columns of zeros
    codes = matrix.codes.view(matrix_shape(matrix.codes.shape))[:rows, :cols]
    inverses = matrix.layout.spread(matrix.scales, rows, cols)
    return BlockCast(flat, codes, inverses, matrix.element)


def _what_if(source: Source, quantizer: Any, of: TensorName) -> Fp8Quantizer:
    """Return a quantizer of the requested recipe, which is not the recipe in use."""
    rules = rules_named(source.recipe)
    format = getattr(quantizer, "format", -1)
    format = E4M3 if format < 0 else format
    found = None if rules is None else rules.what_if_quantizer(of.tensor, format)
    if found is None:
        raise ValueError(
            f"[LogFp8TensorStats] Cannot recreate quantizer for {source.recipe}: its scale comes "
            f"from a history of amaxes that was not kept, and the tensor is quantised by "
            f"{getattr(quantizer, 'scaling', '') or 'nothing'} (layer {of.layer}, tensor "
            f"{of.tensor})"
        )
    return found


def _cast_again(
    x: torch.Tensor, source: Source, quantizer: Fp8Quantizer, whole_amax: Amax | None
) -> Cast | BlockCast:
    """Cast a tensor only for statistics: the layer does not make this cast."""
    columnwise = source.columnwise and quantizer.layout.in_blocks
    flat = x.view(matrix_shape(x.shape))
    request = OperandRequest(quantizer, not columnwise, columnwise)
    if isinstance(quantizer, CurrentQuantizer) and whole_amax is not None:
        options = quantizer.format, quantizer.power_of_2, quantizer.epsilon
        made = quantizer.cast(flat, current_scales(whole_amax(flat), *options), request)
    else:
        made = quantizer.operands(flat, request)
    matrix = made.columnwise if columnwise else made.rowwise
    assert isinstance(matrix, Fp8Matrix)
    if quantizer.layout.in_blocks:
        return _block_cast(x, matrix, source)
    return Cast(x, matrix.codes.view(x.shape), matrix.scales, matrix.format)
