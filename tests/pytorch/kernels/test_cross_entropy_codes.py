"""The gradient of cross entropy in FP8 is the gradient in fp32, rounded once, on both backends."""

import pytest
import torch
from rulers import assert_bitwise

from transformer_engine.pytorch.dtypes import E4M3, E5M2
from transformer_engine.pytorch.kernels.cross_entropy import (
    ELSEWHERE,
    IGNORED,
    cross_entropy_backward_,
    cross_entropy_backward_codes_,
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


def outputs(x, rowwise, columnwise):
    """Memory for the codes of the gradients of `x`, and for the transposed codes."""
    codes = torch.empty_like(x, dtype=torch.uint8) if rowwise else None
    return codes, x.new_empty(x.shape[::-1], dtype=torch.uint8) if columnwise else None


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
        codes, transposed = outputs(x, rowwise, columnwise)
        cross_entropy_backward_codes_(logits, *rest, scales, format, codes, transposed, 0, plain)
        assert_bitwise(logits, in_dtype if plain else x)
        for found, wanted, reference in (
            (codes, rowwise, expected[0]),
            (transposed, columnwise, expected[1]),
        ):
            if wanted:
                assert_bitwise(found, reference)


@pytest.mark.parametrize("first", [0, 3, 128])
@pytest.mark.parametrize("rows", [1, 5, 130])
def test_codes_of_some_rows(device, rows, first):
    """They are written into those of more rows, which stay as they are."""
    x, *rest = problem((rows, 264), torch.bfloat16, device, False)
    scales = torch.tensor(SCALES, device=device)
    own, more = outputs(x, True, True), outputs(x.new_empty(rows + 131, 264), True, True)
    for codes in more:
        codes.fill_(77)
    cross_entropy_backward_codes_(x, *rest, scales, E5M2, *own, 0, False)
    cross_entropy_backward_codes_(x, *rest, scales, E5M2, *more, first, False)
    for part, whole in ((own[0], more[0]), (own[1].t(), more[1].t())):
        assert torch.equal(whole[first : first + rows], part)
        whole[first : first + rows] = 77
        assert (whole == 77).all()


def test_ignored_rows_are_zero(device):
    x = torch.full((2, 48), float("nan"), device=device)
    labels = torch.full((2,), IGNORED, dtype=torch.int32, device=device)
    rest = (torch.zeros(2, device=device), None, 0.1, 0.01)
    both = outputs(x, True, True)
    how = (torch.tensor(SCALES, device=device), E5M2, *both, 0, False)
    cross_entropy_backward_codes_(x, labels, *rest, *how)
    for codes in both:
        assert not codes.any()


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("shape", [(3, 264), (2, 8200), (3, 33)], ids=str)
def test_memory_of_the_kernel(shape):
    arguments = problem(shape, torch.bfloat16, "cuda", False)
    scales = torch.tensor(SCALES, device="cuda")
    both = outputs(arguments[0], True, True)
    cross_entropy_backward_codes_(*arguments, scales, E5M2, *both, 0, True)


def test_bad_scales():
    arguments = problem((4, 16), torch.float32, "cpu", False)
    with pytest.raises(ValueError, match=r"^\[cross_entropy_backward\] .*scales"):
        both = outputs(arguments[0], True, True)
        cross_entropy_backward_codes_(*arguments, torch.ones(3), E5M2, *both, 0, False)


def test_bad_codes():
    x, *rest = problem((4, 16), torch.float32, "cpu", False)
    scales = torch.tensor(SCALES)
    codes = torch.empty(16, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"^\[cross_entropy_backward\] .*column-wise"):
        cross_entropy_backward_codes_(x, *rest, scales, E5M2, None, codes, 0, False)
