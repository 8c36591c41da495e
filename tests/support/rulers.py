"""How tests compare results: bit for bit, or within a stated bound."""

from collections.abc import Sequence

import torch

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_bitwise(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts equal shapes, dtypes and bits.

    NaNs are equal whatever their payload. The tensors may be on different devices.
    """
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    as_integer = _INTEGER_OF_SIZE[actual.element_size()]
    different = actual.contiguous().view(as_integer) != expected.contiguous().view(as_integer)
    if actual.is_floating_point() and actual.element_size() > 1:
        different &= ~(actual.isnan() & expected.isnan())
    if different.any():
        first = tuple(different.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(different.sum())} of {actual.numel()} elements differ, first at {first}:"
            f" {actual[first].item()} instead of {expected[first].item()}"
        )


def assert_equal(
    actual: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]
) -> None:
    """Asserts that tensors are equal pairwise, with None only where None is expected."""
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        same = a is b if a is None or b is None else torch.equal(a, b)
        assert same, f"tensor {i} differs"


def assert_codes_close(actual: torch.Tensor, expected: torch.Tensor, share: float = 1e-3) -> None:
    """Asserts that FP8 codes are equal, or one code apart on at most `share` of the elements.

    This is for codes of transcendental functions, whose results may round differently.
    """
    assert actual.shape == expected.shape
    a, b = actual.detach().cpu().view(torch.uint8), expected.detach().cpu().view(torch.uint8)
    # Map sign and magnitude to integers in the order of values, where +0 and -0 are equal.
    steps = [torch.where(c < 128, c.short(), 128 - c.short()) for c in (a, b)]
    distance = (steps[0] - steps[1]).abs()
    assert not bool((distance > 1).any())
    assert int((distance != 0).sum()) <= share * a.numel() + 1


def assert_sum_close(
    actual: torch.Tensor, terms: torch.Tensor, axis: int | tuple[int, ...] = 0
) -> None:
    """Asserts that `actual` is the sum of `terms`, added in fp32 and rounded once to its dtype.

    The order of additions is free. The bound is the standard one: count * 2^-24 * sum of
    magnitudes, plus half an ulp of the dtype.
    """
    terms = terms.detach().cpu().double()
    exact = terms.sum(axis)
    count = terms.numel() // max(1, exact.numel())
    bound = count * 2.0**-24 * terms.abs().sum(axis)
    bound += exact.abs() * torch.finfo(actual.dtype).eps / 2 + torch.finfo(actual.dtype).tiny
    error = (actual.detach().cpu().double() - exact).abs()
    assert actual.shape == exact.shape
    assert bool((error <= bound).all()), f"largest error {float((error - bound).max())} over bound"
