"""`Fp8Padding` appends rows of zeros to each part of the rows, `Fp8Unpadding` removes them."""

import pytest
import torch
from rulers import assert_bitwise

import transformer_engine.pytorch as te


@pytest.mark.parametrize("align", [None, 16, 32])
@pytest.mark.parametrize("splits", [[3, 0, 20], [16, 1, 32]])
def test_padding_and_back(splits: list[int], align: int | None, device: str) -> None:
    size = align or 16
    x = torch.randn(sum(splits), 24, device=device, requires_grad=True)
    padded, sizes = te.Fp8Padding(3, align)(x, splits)
    assert sizes == [(rows + size - 1) // size * size for rows in splits]
    parts = zip(padded.split(sizes), x.split(splits), strict=True)
    for got, own in parts:
        assert_bitwise(got[: own.shape[0]], own)
        assert not got[own.shape[0] :].any()
    back = te.Fp8Unpadding(3, align)(padded, splits)
    assert_bitwise(back, x)
    upstream = torch.randn_like(back)
    back.backward(upstream)
    assert_bitwise(x.grad, upstream)


def test_nothing_is_copied_where_nothing_is_missing(device: str) -> None:
    x = torch.randn(48, 8, device=device)
    padded, sizes = te.Fp8Padding(2)(x, [16, 32])
    assert padded is x and sizes == [16, 32]
    assert te.Fp8Unpadding(2)(x, [16, 32]) is x


def test_experts_between_padding_see_the_same(device: str) -> None:
    experts = te.GroupedLinear(3, 32, 48, device=device)
    splits = [5, 0, 19]
    x = torch.randn(sum(splits), 32, device=device)
    padded, sizes = te.Fp8Padding(3)(x, splits)
    with torch.no_grad(), te.fp8_autocast():
        around = te.Fp8Unpadding(3)(experts(padded, sizes), splits)
        assert_bitwise(around, experts(x, splits))


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"\[Fp8Padding\] expected num_gemms >= 1"):
        te.Fp8Padding(0)
    with pytest.raises(ValueError, match=r"\[Fp8Padding\] expected inp of 3 rows for 2 parts"):
        te.Fp8Padding(2)(torch.ones(4, 8), [1, 2])
    with pytest.raises(ValueError, match=r"\[Fp8Unpadding\] expected inp of 32 rows for 2 parts"):
        te.Fp8Unpadding(2)(torch.ones(16, 8), [1, 2])
    for module in (te.Fp8Padding(2), te.Fp8Unpadding(2)):
        for splits in (None, [1.5, 2.5], "13", [True, False]):
            with pytest.raises(TypeError, match=r"\[Fp8\w+\] expected m_splits to be ints, got"):
                module(torch.ones(4, 8), splits)
        with pytest.raises(ValueError, match=r"\[Fp8\w+\] expected m_splits of 0 or more, got"):
            module(torch.ones(4, 8), [-1, 5])


def test_numbers_of_rows_in_a_tensor(device: str) -> None:
    padded, sizes = te.Fp8Padding(2)(torch.ones(4, 8, device=device), torch.tensor([1, 3]))
    assert sizes == [16, 16] and [type(size) for size in sizes] == [int, int]
    assert te.Fp8Unpadding(2)(padded, torch.tensor([1, 3])).shape == (4, 8)
