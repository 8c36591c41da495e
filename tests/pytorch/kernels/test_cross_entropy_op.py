"""Cross entropy on both backends: compared with float64, special values, errors."""

import pytest
import torch
from rulers import assert_bitwise

from transformer_engine.pytorch.kernels.cross_entropy import (
    ELSEWHERE,
    IGNORED,
    cross_entropy_backward_,
    cross_entropy_forward,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Rows of one access, rows that a block reads in several rounds, rows not aligned to 16 bytes.
SHAPES = [(5, 8), (3, 4096), (2, 50304), (3, 33), (2, 50257)]
NAN, INFINITY = float("nan"), float("inf")
SMOOTHING = 0.1


def problem(shape, dtype):
    x = (torch.randn(shape) * 4).to(dtype)
    labels = torch.randint(shape[1], (shape[0],), dtype=torch.int32)
    labels[0] = IGNORED
    labels[-1] = ELSEWHERE
    return x, labels


def backward(logits, *arguments):
    """The gradients, in a copy of `logits`."""
    dx = logits.clone()
    cross_entropy_backward_(dx, *arguments)
    return dx


def reference(x, labels):
    """The results of `cross_entropy_forward`, computed in float64."""
    x = x.double()
    largest = x.amax(1, keepdim=True)
    shifted = x - largest
    picked = shifted.gather(1, labels.long().clamp(min=0)[:, None])[:, 0]
    picked = picked.masked_fill(labels == IGNORED, 0.0).masked_fill(labels == ELSEWHERE, NAN)
    return torch.stack([largest[:, 0], shifted.exp().sum(1), picked, shifted.sum(1)])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward(device, shape, dtype):
    x, labels = problem(shape, dtype)
    sums = cross_entropy_forward(x.to(device), labels.to(device))
    exact = reference(x, labels)
    assert sums.dtype == torch.float32 and sums.shape == (4, shape[0])
    torch.testing.assert_close(sums.cpu().double(), exact, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert_bitwise(sums[0].cpu(), exact[0].float())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_backward(device, shape, dtype, scaled):
    x, labels = problem(shape, dtype)
    factors = torch.rand(shape[0]) if scaled else None
    share = SMOOTHING / shape[1]
    exact = x.double().softmax(1) - share
    known = labels >= 0
    exact[known, labels[known].long()] -= 1 - SMOOTHING
    exact *= 1.0 if factors is None else factors[:, None]
    exact[labels == IGNORED] = 0.0
    arguments = (
        labels.to(device),
        x.double().logsumexp(1).float().to(device),
        None if factors is None else factors.to(device),
        SMOOTHING,
        share,
    )
    dx = backward(x.to(device), *arguments)
    info = torch.finfo(dtype)
    bound = (exact.abs() + share) * (info.eps + 1e-5) + info.tiny * info.eps + 1e-9
    assert ((dx.cpu().double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("classes", [8, 40])
def test_logits_that_are_not_finite(device, classes):
    x = torch.zeros(4, classes)
    x[0, 3], x[1, 3], x[2] = NAN, INFINITY, -INFINITY
    x[3, 1:] = -INFINITY
    labels = torch.zeros(4, dtype=torch.int32)
    sums = cross_entropy_forward(x.to(device), labels.to(device)).cpu()
    assert sums[1, :2].isnan().all()
    assert sums[:2, 2].tolist() == [-INFINITY, 0.0], "nothing to add up"
    assert sums[:3, 3].tolist() == [0.0, 1.0, 0.0]
    log_sums = torch.zeros(4)
    dx = backward(x.to(device), labels.to(device), log_sums.to(device), None, 0.0, 0.0)
    assert dx[3].tolist() == [0.0] * classes


def test_ignored_rows_are_not_read(device):
    x = torch.full((2, 48), NAN)
    labels = torch.full((2,), IGNORED, dtype=torch.int32)
    arguments = (x.to(device), labels.to(device), torch.zeros(2, device=device), None, 0.1, 0.01)
    assert not backward(*arguments).any()


def test_labels_that_are_no_classes(device):
    labels = torch.tensor([16, -3, 1 << 30], dtype=torch.int32)
    x = torch.zeros(3, 16)
    sums = cross_entropy_forward(x.to(device), labels.to(device))
    assert sums[2].isnan().all() and sums[1].tolist() == [16.0] * 3


def test_no_rows(device):
    x, labels = torch.zeros(0, 16, device=device), torch.zeros(0, dtype=torch.int32, device=device)
    assert cross_entropy_forward(x, labels).shape == (4, 0)
    assert backward(x, labels, x.new_zeros(0), None, 0.0, 0.0).shape == (0, 16)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("shape", [(3, 264), (2, 8200), (3, 33)], ids=str)
def test_memory_of_kernels(shape):
    x, labels = (t.cuda() for t in problem(shape, torch.bfloat16))
    cross_entropy_forward(x, labels)
    cross_entropy_backward_(x, labels, torch.ones(shape[0], device="cuda"), None, 0.1, 0.01)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("logits of shape .* got \\(4, 0\\)", {"logits": torch.zeros(4, 0)}),
        ("labels", {"labels": torch.zeros(3, dtype=torch.int32)}),
        ("labels", {"labels": torch.zeros(4)}),
    ],
)
def test_bad_arguments(message, changes):
    arguments = {
        "logits": torch.zeros(4, 8),
        "labels": torch.zeros(4, dtype=torch.int32),
        **changes,
    }
    with pytest.raises((ValueError, TypeError), match=rf"^\[cross_entropy_forward\] .*{message}"):
        cross_entropy_forward(**arguments)
