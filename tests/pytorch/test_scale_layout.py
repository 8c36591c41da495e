"""`ScaleLayout`: numbers that `_C` takes, shapes of scales, and which values share a scale."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from transformer_engine.pytorch.dtypes import E4M3, E5M2
from transformer_engine.pytorch.fp8.casts.operands import Fp8Matrix, transposed
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.kernels.quantize_blocks import quantize_blocks
from transformer_engine.pytorch.scale_layout import (
    LAYOUTS,
    ROWS,
    SQUARES,
    WHOLE,
    ScaleLayout,
    block_layout,
    element_of,
    layout_of,
)

# The layout of MXFP8: scales are bytes of E8M0, padded to tiles of 128 x 4.
MX = ScaleLayout(3, (1, 32), torch.uint8, scale_multiples=(128, 4))
SHAPES = [(256, 384), (1, 1), (1, 300), (300, 1), (130, 264)]


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), MX], ids=str)
def test_one_number_holds_element_and_layout(layout: ScaleLayout, monkeypatch) -> None:
    monkeypatch.setitem(LAYOUTS, MX.number, MX)
    for element in (E4M3, E5M2):
        code = layout.code(element)
        assert (layout_of(code), element_of(code)) == (layout, element)
        matrix = Fp8Matrix(torch.empty(0), torch.empty(0), code)
        assert matrix.layout is layout and matrix.element == element


def test_the_numbers_are_those_of_the_kernels() -> None:
    assert [layout.number for layout in (WHOLE, ROWS, SQUARES)] == [0, 1, 2]
    assert WHOLE.code(E4M3) == E4M3 and ROWS.code(E4M3) == E4M3 + 16
    assert [layout.dimensions for layout in (WHOLE, ROWS, SQUARES)] == [0, 1, 2]
    assert (block_layout(1), block_layout(2)) == (ROWS, SQUARES)
    with pytest.raises(ValueError, match=r"\[quantizer\] expected blocks of 1 or 2 dimensions"):
        block_layout(3)
    with pytest.raises(ValueError, match=r"expected a format of FP8 matrices, got -1"):
        layout_of(-1)  # a plain operand has no scales


def test_it_is_a_value() -> None:
    assert ScaleLayout(1, (1, 128), columns_first=True, scale_multiples=(1, 4)) == ROWS
    assert len({WHOLE, ROWS, SQUARES, ScaleLayout(0)}) == 3
    with pytest.raises(FrozenInstanceError):
        WHOLE.number = 1  # type: ignore[misc]


def test_what_gemms_take() -> None:
    assert WHOLE.multiplies(WHOLE) and ROWS.multiplies(ROWS) and SQUARES.multiplies(ROWS)
    for other in (ROWS, SQUARES, MX):
        assert not WHOLE.multiplies(other) and not other.multiplies(WHOLE)
    assert not MX.multiplies(ROWS)
    every = (WHOLE, ROWS, SQUARES, MX)
    assert [layout.fast_accumulation for layout in every] == [True, False, False, False]
    assert [layout.transposes for layout in every] == [True, False, True, False]


def test_there_is_room_for_other_blocks() -> None:
    assert MX.scale_shape(256, 256) == (256, 8)
    assert MX.scale_shape(1, 33) == (128, 4)
    assert (MX.run, MX.dimensions, MX.in_blocks) == (32, 1, True)
    scales = torch.arange(128 * 4.0).view(128, 4)
    assert MX.spread(scales, 2, 34).tolist() == [[0.0] * 32 + [1.0] * 2, [4.0] * 32 + [5.0] * 2]


@pytest.mark.parametrize("layout", [ROWS, SQUARES], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_agree(device: str, shape: tuple[int, int], layout: ScaleLayout) -> None:
    x = torch.randn(shape, device=device) * torch.logspace(-4, 3, shape[1], device=device)
    code = layout.code(E4M3)
    codes, scales, *_ = quantize_blocks(x, code, False, 0.0, True, False, None)
    assert tuple(scales.shape) == layout.scale_shape(*shape)
    values = codes.view(torch.float8_e4m3fn).float() * layout.spread(scales, *shape)
    assert torch.equal(values, dequantize(codes, code, scales, torch.float32))


@pytest.mark.parametrize("layout", [WHOLE, SQUARES], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transposes(device: str, shape: tuple[int, int], layout: ScaleLayout) -> None:
    scales = torch.rand(layout.scale_shape(*shape), device=device)
    codes = torch.randint(0, 120, shape, dtype=torch.uint8, device=device)
    matrix = Fp8Matrix(codes, scales, layout.code(E4M3))
    other = transposed(matrix)
    assert other.layout is layout and torch.equal(other.codes, codes.t())
    values = [dequantize(m.codes, m.format, m.scales, torch.float32) for m in (matrix, other)]
    assert torch.equal(values[0].t(), values[1])
