"""Norm cases: inputs on a device, the definition in fp64, and how close a result must be to it."""

import pytest
import torch
from rulers import assert_bitwise

from transformer_engine.pytorch.kernels.norm import (
    LAYER_NORM,
    RMS_NORM,
    norm_backward,
    norm_forward,
)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
KINDS = pytest.mark.parametrize("kind", [LAYER_NORM, RMS_NORM], ids=["layer", "rms"])
EPSILON = 1e-5
# One column, odd widths (no wide access), rows that fill one warp, rows of several warps with and
# without idle lanes, more rows than the GPU holds at once, several leading dimensions.
SHAPES = [
    (1, 1),
    (3, 1),
    (5, 7),
    (33, 65),
    (2, 3, 48),
    (300, 64),
    (130, 264),
    (16, 768),
    (40, 1024),
    (50, 4096),
    (3, 4104),
    (5, 12288),
    (2, 32768),
    (2, 40000),
    (4300, 16),
]
# Hidden sizes of models, with few and with many rows.
BENCHMARK_SHAPES = [
    (8192, 4096),
    (16384, 4096),
    (8192, 8192),
    (2048, 4096),
    (1024, 12288),
    (8192, 768),
    (16384, 1024),
    (131072, 128),
]
# Dtypes of x, gamma, and y (dy has that of y).
DTYPES = [
    (F32, F32, F32),
    (F16, F16, F16),
    (BF16, BF16, BF16),
    (BF16, F32, BF16),
    (F16, F32, F16),
    (F32, BF16, BF16),
    (F32, F32, F16),
    (BF16, F16, F32),
]


class Case:
    """Inputs of one call on one device, and the definition in fp64."""

    def __init__(self, kind, shape, dtypes, device, *, zero_centered=False, epsilon=EPSILON):
        x_dtype, gamma_dtype, y_dtype = dtypes
        cols = shape[-1]
        self.kind, self.zero_centered, self.epsilon, self.y_dtype = (
            kind,
            zero_centered,
            epsilon,
            y_dtype,
        )
        self.x = (torch.randn(shape) * 2 + 0.5).to(x_dtype).to(device)
        offset = 0.0 if zero_centered else 1.0
        self.gamma = (offset + torch.randn(cols) / 4).to(gamma_dtype).to(device)
        self.beta = torch.randn(cols).to(gamma_dtype).to(device) if kind == LAYER_NORM else None
        self.dy = torch.randn(shape).to(y_dtype).to(device)

    def to(self, device):
        copy = object.__new__(Case)
        for name, value in vars(self).items():
            setattr(copy, name, value.to(device) if isinstance(value, torch.Tensor) else value)
        return copy

    def forward(self, out_dtype=None, **fp8_arguments):
        return norm_forward(
            self.x,
            self.gamma,
            self.beta,
            self.kind,
            self.epsilon,
            self.zero_centered,
            out_dtype,
            **fp8_arguments,
        )

    def backward(self, mean, rstd, residual_grad=None):
        return norm_backward(
            self.dy,
            self.x,
            self.gamma,
            mean,
            rstd,
            self.kind,
            self.zero_centered,
            residual_grad,
        )

    def statistics(self):
        x = self.x.cpu().double()
        x = x.view(-1, x.shape[-1])
        mean = x.mean(-1) if self.kind == LAYER_NORM else torch.zeros(x.shape[0]).double()
        square = (x - mean[:, None]).square().mean(-1)
        return mean, (square + self.epsilon).rsqrt()

    def xhat(self):
        mean, rstd = self.statistics()
        x = self.x.cpu().double()
        return ((x.view(-1, x.shape[-1]) - mean[:, None]) * rstd[:, None]).view(x.shape)

    def weight(self):
        return self.gamma.cpu().double() + (1.0 if self.zero_centered else 0.0)

    def y(self):
        y = self.xhat() * self.weight()
        return y if self.beta is None else y + self.beta.cpu().double()

    def dx(self):
        """The textbook formula; test_formula_is_autograd compares it with autograd."""
        xhat, grad = self.xhat(), self.dy.cpu().double() * self.weight()
        along = (grad * xhat).mean(-1, keepdim=True)
        offset = grad.mean(-1, keepdim=True) if self.kind == LAYER_NORM else 0.0
        _, rstd = self.statistics()
        return (grad - offset - xhat * along) * rstd.view(*self.x.shape[:-1], 1)

    def dx_terms(self):
        """Returns the largest term of the sum in `dx`. The terms may cancel."""
        _, rstd = self.statistics()
        grad = self.dy.cpu().double() * self.weight() * rstd.view(*self.x.shape[:-1], 1)
        return float(grad.abs().max()) if grad.numel() else 0.0


def close(got, expected, slack=4e-6, terms=0.0):
    """Asserts equality up to one rounding to the dtype of `got`, and errors of fp32 arithmetic.

    Errors of fp32 arithmetic may be as large as `slack` times the largest value or term.
    """
    largest = max(terms, float(expected.abs().max())) if expected.numel() else 0.0
    torch.testing.assert_close(
        got.double().cpu(),
        expected,
        rtol=torch.finfo(got.dtype).eps / 2 * 1.01,
        atol=slack * largest + torch.finfo(got.dtype).smallest_normal,
    )


def same(got, expected):
    """Asserts equal bits on the CPU; kernels that add in another order may round differently."""
    if got.device.type == "cpu":
        assert_bitwise(got, expected)
    else:
        torch.testing.assert_close(got, expected, rtol=torch.finfo(got.dtype).eps * 1.01, atol=1e-5)


def close_sum(got, terms, slack):
    """Asserts that `got` holds the column sums of `terms` [rows, cols], added in fp32.

    `slack` bounds the errors that the terms of a column have in total.
    """
    bound = (terms.shape[0] + 16) * 2.0**-24 * terms.abs().sum(0) + slack
    bound += terms.sum(0).abs() * torch.finfo(got.dtype).eps / 2 * 1.01
    bound += torch.finfo(got.dtype).smallest_normal
    assert got.shape == bound.shape
    assert bool(((got.double().cpu() - terms.sum(0)).abs() <= bound).all())


def check_forward(case):
    y, rowwise, columnwise, scales, mean, rstd = case.forward(case.y_dtype)
    assert y.dtype == case.y_dtype and rowwise is columnwise is scales is None
    close(y, case.y())
    expected_mean, expected_rstd = case.statistics()
    close(rstd, expected_rstd)
    assert (mean is not None) == (case.kind == LAYER_NORM)
    if mean is not None:
        close(mean, expected_mean)
    return mean, rstd


def check_backward(case, mean, rstd, slack=1e-5):
    dx, dgamma, dbeta = case.backward(mean, rstd)
    assert dx.dtype == case.x.dtype and dgamma.dtype == case.gamma.dtype
    close(dx, case.dx(), slack, case.dx_terms())
    cols = case.x.shape[-1]
    dy = case.dy.cpu().double().view(-1, cols)
    close_sum(dgamma, dy * case.xhat().view(-1, cols), slack * dy.abs().sum(0))
    assert (dbeta is not None) == (case.kind == LAYER_NORM)
    if dbeta is not None:
        assert dbeta.dtype == case.gamma.dtype
        close_sum(dbeta, dy, 0.0)
