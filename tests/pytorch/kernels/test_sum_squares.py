"""Sums of squares of many tensors, compared with float64."""

import pytest
import torch
from rulers import assert_bitwise

from transformer_engine import _C
from transformer_engine.pytorch.kernels.sum_squares import sum_squares

BLOCK = 1 << 14
# No value, one value, part of a block, whole blocks, numbers that do not fill whole accesses.
COUNTS = (0, 1, 4096, BLOCK, 3 * BLOCK, BLOCK + 8, 2 * BLOCK + 3)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def expected(tensors):
    parts = [part for x in tensors for part in x.double().cpu().flatten().split(BLOCK)]
    return torch.stack([part.square().sum() for part in parts if part.numel()])


def values(count, dtype, device):
    return torch.randn(count).to(device, dtype)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums(dtype, device):
    tensors = [values(count, dtype, device) for count in COUNTS]
    sums = sum_squares(tensors)
    assert sums.dtype is torch.float32
    torch.testing.assert_close(sums.double().cpu(), expected(tensors), rtol=1e-5, atol=0.0)
    assert_bitwise(sum_squares(tensors), sums)


def test_more_tensors_than_a_launch_takes_and_of_several_dtypes(device):
    tensors = [values(5 + i, DTYPES[i // 7 % 3], device).view(1, -1) for i in range(500)]
    sums = sum_squares(tensors)
    torch.testing.assert_close(sums.double().cpu(), expected(tensors), rtol=1e-5, atol=0.0)


@pytest.mark.sanitize
@pytest.mark.parametrize("offset", [1, 2, 4])
def test_unaligned_memory(offset, device):
    x = values(BLOCK + 64 + offset, torch.bfloat16, device)[offset:]
    torch.testing.assert_close(sum_squares([x]).double().cpu(), expected([x]), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), 3e38])
def test_what_is_no_number_and_what_overflows_stays(special, device):
    x = torch.zeros(2 * BLOCK, device=device)
    x[BLOCK + 1] = special
    quiet, loud = sum_squares([x]).tolist()
    assert quiet == 0.0 and not loud < float("inf")


def test_nothing(device):
    assert sum_squares([torch.empty(0, device=device)]).shape == (0,)


def test_mistakes_are_named(device):
    x = torch.zeros(4, 4, device=device)
    with pytest.raises(ValueError, match=r"\[sum_squares\].*contiguous"):
        sum_squares([x.t()[1:]])
    with pytest.raises((ValueError, TypeError), match=r"\[sum_squares\]"):
        sum_squares([x.double()])
    with pytest.raises(ValueError, match=r"\[sum_squares\]"):
        _C.sum_squares([x], torch.empty(2, device=device))


def test_in_compiled_code():
    tensors = [torch.randn(3), torch.randn(2 * BLOCK)]
    compiled = torch.compile(lambda x: sum_squares(x).sum(), backend="aot_eager", fullgraph=True)
    assert_bitwise(compiled(tensors), sum_squares(tensors).sum())
