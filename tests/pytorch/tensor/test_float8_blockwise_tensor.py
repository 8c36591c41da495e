import copy
import io

import block_reference as blocks
import pytest
import torch
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
)

both_dimensions = pytest.mark.parametrize("dimensions", [1, 2])


def make(device: str, dimensions: int, **usage: bool):
    x = (torch.randn(3, 50, 144) * torch.logspace(-2, 2, 144)).bfloat16().to(device)
    sides = {"rowwise": True, "columnwise": True} | usage
    quantizer = Float8BlockQuantizer(te.DType.kFloat8E4M3, block_scaling_dim=dimensions, **sides)
    return x, quantizer(x)


@both_dimensions
def test_holds_codes_and_scales_of_both_sides(device: str, dimensions: int) -> None:
    x, q = make(device, dimensions)
    assert isinstance(q, Float8BlockwiseQTensor) and isinstance(q, torch.Tensor)
    assert (q.shape, q.dtype, q.device) == (x.shape, x.dtype, x.device)
    assert q._is_2D_scaled == (dimensions == 2)
    matrix = x.cpu().view(-1, 144)
    codes, inverses = blocks.quantize(matrix, dimensions)
    assert_bitwise(q._rowwise_data, codes.view(x.shape))
    assert_bitwise(q._rowwise_scale_inv, inverses)
    assert q._rowwise_scale_inv.shape == q._quantizer.get_scale_shape(x.shape, False)
    expected = blocks.dequantize(codes, inverses, dimensions).view(x.shape)
    assert_bitwise(q.dequantize(dtype=torch.float32), expected)
    assert q.dequantize().dtype is torch.bfloat16
    codes, inverses = blocks.quantize(matrix.t().contiguous(), dimensions)
    assert_bitwise(q._columnwise_data, codes)
    assert_bitwise(q._columnwise_scale_inv, inverses)
    assert q._columnwise_data.shape == q._quantizer.get_columnwise_shape(x.shape)
    assert q._columnwise_scale_inv.shape == q._quantizer.get_scale_shape(x.shape, True)
    assert "Float8BlockwiseQTensor(fp8_dtype=E4M3" in repr(q)


@both_dimensions
def test_one_side_is_enough(device: str, dimensions: int) -> None:
    _, whole = make(device, dimensions)
    q = whole._quantizer
    q.set_usage(rowwise=False)
    columns = q(whole.dequantize())
    assert columns._rowwise_data is None and columns.side(False) is None
    expected = blocks.dequantize(
        columns._columnwise_data.cpu(), columns._columnwise_scale_inv.cpu(), dimensions
    )
    assert_bitwise(columns.dequantize(dtype=torch.float32), expected.t().reshape(whole.shape))
    with pytest.raises(ValueError, match="expected row-wise or column-wise data"):
        columns.with_parts((None,) * 4, columns.shape)


@both_dimensions
def test_values_of_transposed_codes_are_contiguous(device: str, dimensions: int) -> None:
    x, whole = make(device, dimensions, rowwise=False)
    columns = whole._quantizer(x.view(150, 144))
    plain = columns.dequantize()
    assert plain.stride() == columns.stride() == (144, 1)
    with pytest.warns(UserWarning, match="it is dequantised"):
        assert_bitwise(columns.reshape(-1, 16), plain.reshape(-1, 16))


@both_dimensions
def test_operations_run_on_values(device: str, dimensions: int) -> None:
    _, q = make(device, dimensions)
    plain = q.dequantize()
    assert_bitwise(q + 1, plain + 1)
    assert type(q * 2) is torch.Tensor and type(q[1:3]) is torch.Tensor
    before = q._rowwise_data
    q.mul_(2)
    assert q._rowwise_data is before
    assert_bitwise(q.dequantize(), plain * 2)  # scales are powers of two


def test_detach_shares_and_clone_copies(device: str) -> None:
    _, q = make(device, 1)
    assert q.detach()._rowwise_data is q._rowwise_data
    for twin in (q.clone(), copy.deepcopy(q)):
        assert isinstance(twin, Float8BlockwiseQTensor)
        for own, part in zip(twin.parts, q.parts, strict=True):
            assert own.data_ptr() != part.data_ptr()
            assert_bitwise(own, part)


@both_dimensions
def test_views_keep_blocks_or_are_dequantised_aloud(device: str, dimensions: int) -> None:
    _, q = make(device, dimensions)
    for shape in [(150, 144), (5, 30, -1), (3, 50, 144)]:
        v = q.view(shape)
        assert isinstance(v, Float8BlockwiseQTensor)
        assert_bitwise(v.dequantize(), q.dequantize().view(shape))
    with pytest.warns(UserWarning, match=r"last size \(144,\) kept, got \(150, 12, 12\)"):
        v = q.view(150, 12, 12)
    assert type(v) is torch.Tensor
    assert_bitwise(v, q.dequantize().view(150, 12, 12))


@both_dimensions
def test_copies_both_ways(device: str, dimensions: int) -> None:
    x, q = make(device, dimensions)
    _, other = make(device, dimensions)
    other.copy_(q)
    assert_bitwise(other.dequantize(), q.dequantize())
    other.copy_(x * 4)
    assert_bitwise(other.dequantize(), q.dequantize() * 4)
    plain = torch.empty_like(x)
    plain.copy_(q)
    assert_bitwise(plain, q.dequantize())
    one_sided = make(device, dimensions, columnwise=False)[1]
    other.copy_(one_sided)  # makes the column-wise codes again
    assert_bitwise(other.dequantize(), one_sided.dequantize())


def test_moves_as_codes_and_converts_as_values(device: str) -> None:
    _, q = make(device, 1)
    moved = q.to("cpu")
    assert isinstance(moved, Float8BlockwiseQTensor) and moved.device.type == "cpu"
    assert_bitwise(moved.dequantize(), q.dequantize())
    assert type(q.float()) is torch.Tensor
    assert_bitwise(q.float(), q.dequantize(dtype=torch.float32))


@both_dimensions
def test_saved_without_pickled_code(device: str, dimensions: int) -> None:
    _, q = make(device, dimensions)
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    back = torch.load(file, weights_only=True)
    assert_bitwise(back.dequantize(), q.dequantize())
    with pytest.raises(RuntimeError, match="made without one"):
        back.mul_(2)


def test_flattens_for_compile() -> None:
    _, q = make("cpu", 1, columnwise=False)
    names, context = q.__tensor_flatten__()
    assert names == ["_rowwise_data", "_rowwise_scale_inv"]
    inner = {name: getattr(q, name) for name in names}
    again = Float8BlockwiseQTensor.__tensor_unflatten__(inner, context, q.shape, q.stride())
    assert_bitwise(again.dequantize(), q.dequantize())


def test_quantizes_into_a_tensor() -> None:
    x, q = make("cpu", 2)
    assert q._quantizer.quantize(x * 2, out=q) is q
    assert_bitwise(q.dequantize(), make_like(x * 2, q).dequantize())


def make_like(x: torch.Tensor, q: Float8BlockwiseQTensor) -> Float8BlockwiseQTensor:
    return q._quantizer(x)


def test_whole_blocks_are_needed_to_gather() -> None:
    _, q = make("cpu", 1)
    assert q._quantizer.is_quantizable(torch.empty(2, 64, 256))
    assert not q._quantizer.is_quantizable(torch.empty(128, 200))
    assert not q._quantizer.is_quantizable(torch.empty(128))
