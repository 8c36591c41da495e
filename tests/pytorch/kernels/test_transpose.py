"""The transpose of one-byte codes, and of the scales of their blocks."""

import pytest
import torch
from rulers import assert_bitwise

from transformer_engine import _C
from transformer_engine.pytorch.kernels.transpose import transpose, transpose_blocks
from transformer_engine.pytorch.scale_layout import block_layout

SHAPES = [(256, 256), (1, 1), (1, 300), (300, 1), (17, 16), (130, 264), (129, 1040), (33, 65)]
SHAPES += [(0, 5), (5, 0), (2, 3, 48)]


def codes_of(shape):
    return torch.randint(256, shape, dtype=torch.uint8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_torch(device, shape):
    codes = codes_of(shape)
    expected = codes.flatten(0, -2) if codes.ndim > 2 else codes
    assert_bitwise(transpose(codes.to(device)), expected.T.contiguous())


@pytest.mark.sanitize
@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("shape", [(64, 64), (70, 48), (3, 5)], ids=str)
def test_alignment(device, shape, offset):
    codes = codes_of((shape[0] * shape[1] + offset,))
    got = transpose(codes.to(device)[offset:].view(shape))
    assert_bitwise(got, codes[offset:].view(shape).T.contiguous())


@pytest.mark.sanitize
@pytest.mark.parametrize("shape", [*SHAPES, (128, 1040), (700, 300)], ids=str)
def test_scales_of_blocks_change_place(device, shape):
    codes = codes_of(shape)
    matrix = codes.flatten(0, -2) if codes.ndim > 2 else codes
    blocks = [-(-size // 128) for size in matrix.shape]
    scales = torch.full(block_layout(2).scale_shape(*matrix.shape), torch.nan)
    scales[:, : blocks[1]] = torch.rand(blocks)
    got, got_scales = transpose_blocks(codes.to(device), scales.to(device))
    assert_bitwise(got, matrix.T.contiguous())
    expected = torch.zeros(block_layout(2).scale_shape(*matrix.T.shape))
    expected[:, : blocks[0]] = scales[:, : blocks[1]].T
    assert_bitwise(got_scales, expected)


@pytest.mark.sanitize
@pytest.mark.parametrize("shape", [(64, 48), (2, 24, 40), (130, 70)], ids=str)
def test_rows_of_the_output_may_be_apart(device, shape):
    """This is how the transposed codes of several ranks are written to one matrix."""
    codes = codes_of(shape).to(device)
    rows, cols = codes.numel() // shape[-1], shape[-1]
    wide = torch.zeros(cols, 3 * rows, dtype=torch.uint8, device=device)
    _C.transpose(codes, wide.narrow(1, rows, rows))
    assert_bitwise(wide[:, rows : 2 * rows].contiguous(), transpose(codes))
    assert not wide[:, :rows].any() and not wide[:, 2 * rows :].any()


def test_keeps_the_dtype(device):
    codes = codes_of((4, 6)).view(torch.float8_e4m3fn).to(device)
    assert transpose(codes).dtype == torch.float8_e4m3fn


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    codes = torch.zeros(2**19 + 64, 4096, dtype=torch.uint8, device="cuda")
    tail = codes_of((64, 4096))
    codes[-64:] = tail.cuda()
    got = transpose(codes)
    assert_bitwise(got[:, -64:], tail.T.contiguous())
    assert int(got[:, :-64].count_nonzero()) == 0


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (TypeError, "one-byte elements, got float32", {"x": torch.ones(4, 8)}),
        (ValueError, "x to be contiguous", {"x": codes_of((8, 4)).T}),
        (TypeError, "uint8 for the output, got float32", {"out": torch.ones(8, 4)}),
        (
            ValueError,
            r"8 x 4 elements for the output, got shape \(4, 8\)",
            {"out": codes_of((4, 8))},
        ),
        (ValueError, "each row of the output in memory of its own", {"out": codes_of((4, 8)).T}),
        (ValueError, "a tensor for scales, got none", {"out_scales": torch.ones(1, 4)}),
        (
            ValueError,
            r"shape \(1, 4\) for the output's scales",
            {"scales": torch.ones(1, 4), "out_scales": torch.ones(1, 1)},
        ),
    ],
)
def test_errors(error, message, changed):
    args = {"x": codes_of((4, 8)), "out": codes_of((8, 4))}
    with pytest.raises(error, match=r"\[transpose\] expected " + message):
        _C.transpose(**(args | changed))
