"""Casts between dtypes of high precision give the bits of torch's casts."""

import itertools

import pytest
import torch
from rulers import assert_bitwise

from transformer_engine.pytorch.kernels.cast import cast

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PAIRS = list(itertools.permutations(DTYPES, 2))
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    torch.inf,
    -torch.inf,
    65504.0,
    65520.0,
    1e38,
    3.4e38,
    6e-8,
    1e-40,
    1 + 2**-8,
]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
@pytest.mark.parametrize("count", [0, 1, 7, 4096, 40_003])
def test_the_bits_of_torch(device, source, target, count):
    x = torch.cat((torch.tensor(SPECIAL), torch.randn(count) * 100)).to(device, source)
    assert_bitwise(cast(x, target), x.to(target))
    assert_bitwise(cast(x[1:], target), x[1:].to(target))  # not aligned
    assert cast(torch.full((5,), torch.nan, dtype=source, device=device), target).isnan().all()


@pytest.mark.parametrize(("source", "target"), [PAIRS[0], PAIRS[-1]], ids=str)
@pytest.mark.gpu
@pytest.mark.sanitize
def test_small_casts_stay_in_memory(source, target):
    for count in (1, 3, 8, 100):
        x = torch.randn(count, device="cuda").to(source)
        assert_bitwise(cast(x, target), x.to(target))


@pytest.mark.parametrize(("source", "target"), [*PAIRS, (torch.float32,) * 2], ids=str)
@pytest.mark.parametrize("count", [1, 7, 40_003])
def test_a_factor_is_multiplied_in_fp32(device, source, target, count):
    x = torch.cat((torch.tensor(SPECIAL), torch.randn(count) * 100)).to(device, source)
    factor = torch.tensor([0.3], device=device)
    assert_bitwise(cast(x, target, factor), (x.float() * factor).to(target))
    assert_bitwise(cast(x[1:], target, factor), (x[1:].float() * factor).to(target))
    assert_bitwise(cast(x[::2], target, factor), (x[::2].float() * factor).to(target))


def test_factors_that_are_refused():
    x = torch.randn(4)
    for factor in (torch.ones(2), torch.ones(1, dtype=torch.float64)):
        with pytest.raises((TypeError, ValueError), match=r"\[cast\] expected .*factor"):
            cast(x, torch.bfloat16, factor)


def test_what_is_left_to_torch():
    x = torch.randn(4, 6)
    assert cast(x, torch.float32) is x
    assert_bitwise(cast(x.t(), torch.bfloat16), x.t().to(torch.bfloat16))
    assert cast(x.to("meta"), torch.float16).device.type == "meta"
