"""The gradient of cross entropy in FP8 is the gradient in fp32, rounded once, on both backends."""

import pytest
import torch
from rulers import assert_bitwise

from transformer_engine.pytorch.dtypes import E4M3, E5M2
from transformer_engine.pytorch.kernels.cross_entropy import (
    ELSEWHERE,
    IGNORED,
    cross_entropy_backward_,
    cross_entropy_backward_codes,
)
from transformer_engine.pytorch.kernels.quantize import quantize

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Parts of a tile, several tiles, rows that are not aligned to 16 bytes.
SHAPES = [(5, 8), (3, 4096), (130, 264), (3, 33), (2, 50257)]
SMOOTHING, SCALES = 0.1, (2.0**-15, 2.0**15)


def problem(shape, dtype, device, scaled):
    """Arguments of the op, from `logits` to `evenly`."""
    x = (torch.randn(shape) * 4).to(dtype)
    labels = torch.randint(shape[1], (shape[0],), dtype=torch.int32)
    labels[0], labels[-1] = IGNORED, ELSEWHERE
    tensors = (x, labels, x.double().logsumexp(1).float(), torch.rand(shape[0]) if scaled else None)
    on_device = [None if t is None else t.to(device) for t in tensors]
    return (*on_device, SMOOTHING, SMOOTHING / shape[1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("format", [E4M3, E5M2])
def test_codes(device, shape, dtype, scaled, format):
    x, *rest = problem(shape, dtype, device, scaled)
    in_fp32, in_dtype = x.to(torch.float32, copy=True), x.clone()
    for logits in (in_fp32, in_dtype):
        cross_entropy_backward_(logits, *rest)
    scales = torch.tensor(SCALES, device=device)
    expected = quantize(in_fp32, format, None, None, scales, True, True, None)
    sides = [(True, True, False), (True, False, True), (False, True, True)]
    for rowwise, columnwise, plain in sides:
        logits = x.clone()
        how = (scales, format, rowwise, columnwise, plain)
        codes, transposed = cross_entropy_backward_codes(logits, *rest, *how)
        assert_bitwise(logits, in_dtype if plain else x)
        for found, wanted, reference in (
            (codes, rowwise, expected[0]),
            (transposed, columnwise, expected[1]),
        ):
            assert (found is not None) is wanted
            if found is not None:
                assert_bitwise(found, reference)


def test_ignored_rows_are_zero(device):
    x = torch.full((2, 48), float("nan"), device=device)
    labels = torch.full((2,), IGNORED, dtype=torch.int32, device=device)
    rest = (torch.zeros(2, device=device), None, 0.1, 0.01)
    how = (torch.tensor(SCALES, device=device), E5M2, True, True, False)
    for codes in cross_entropy_backward_codes(x, labels, *rest, *how):
        assert not codes.any()


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("shape", [(3, 264), (2, 8200), (3, 33)], ids=str)
def test_memory_of_the_kernel(shape):
    arguments = problem(shape, torch.bfloat16, "cuda", False)
    scales = torch.tensor(SCALES, device="cuda")
    cross_entropy_backward_codes(*arguments, scales, E5M2, True, True, True)


def test_bad_scales():
    arguments = problem((4, 16), torch.float32, "cpu", False)
    with pytest.raises(ValueError, match=r"^\[cross_entropy_backward\] .*scales"):
        cross_entropy_backward_codes(*arguments, torch.ones(3), E5M2, True, True, False)
