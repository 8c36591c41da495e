"""Tensors for tests of statistics, and the statistics by their definitions in float64."""

import math

import torch

from transformer_engine.pytorch.kernels.moments import MOMENTS

SHAPES = [(1,), (7,), (3, 5), (64, 72), (256, 257), (1000, 1003), (2, 3, 512)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _normal(shape):
    return torch.randn(shape)


def _with(**places):
    """Makes normal values, with `values` at some positions of the flattened tensor."""

    def make(shape):
        x = torch.randn(shape)
        flat = x.view(-1)
        for i, value in enumerate(places["values"]):
            flat[(i * 7919) % flat.numel()] = value
        return x

    return make


def _far_apart(shape):
    """Returns a tensor in five parts, whose means are 50 standard deviations apart."""
    x = torch.randn(shape).flatten()
    return (x + 50 * (torch.arange(x.numel()) * 5 // x.numel())).view(shape)


# What the values exercise: a large mean, one sign only, zeros of either sign, values whose squares
# overflow or underflow in fp32, outliers at positions from which the pivot is computed, NaN and
# infinities.
VALUES = {
    "normal": _normal,
    "mean 100": lambda shape: 100.0 + torch.randn(shape),
    "mean -100": lambda shape: -100.0 + torch.randn(shape),
    "far apart": _far_apart,
    "mean 3": lambda shape: 3.0 + torch.randn(shape),
    "positive": lambda shape: torch.rand(shape) + 0.5,
    "negative": lambda shape: -torch.rand(shape) - 0.5,
    "relu": lambda shape: torch.randn(shape).relu(),
    "zeros": torch.zeros,
    "negative zeros": lambda shape: -torch.zeros(shape),
    "constant": lambda shape: torch.full(shape, 0.1),
    "gradients": lambda shape: 1e-7 * torch.randn(shape),
    "tiny": lambda shape: 1e-25 * torch.randn(shape),
    "huge": lambda shape: 1e30 * torch.randn(shape),
    "outliers": _with(values=[6e4, -5e4]),
    "nan": _with(values=[math.nan]),
    "inf": _with(values=[math.inf]),
    "both infs": _with(values=[math.inf, -math.inf, math.inf]),
}


def expected(x: torch.Tensor) -> dict[str, float]:
    """Returns the fields of a row of moments, computed by torch in float64."""
    x = x.detach().cpu().double().flatten()
    magnitudes = x.abs()
    nonzero = magnitudes[(magnitudes != 0) & ~magnitudes.isnan()]
    mean = x.mean()
    return {
        "count": float(x.numel()),
        "mean": float(mean),
        "m2": float((x - mean).square().sum()),
        "sum_abs": float(magnitudes.sum()),
        "sum_squares": float(x.square().sum()),
        "min": float(x.min()),
        "max": float(x.max()),
        "amax": float(magnitudes.max()),
        "smallest": float(nonzero.min()) if nonzero.numel() else math.inf,
        "nonzeros": float(x.count_nonzero()),
        "nans": float(x.isnan().sum()),
        "infs": float(x.isinf().sum()),
    }


def assert_row(row: torch.Tensor, x: torch.Tensor) -> None:
    """Asserts that `row` holds the moments of `x`: sums to 1e-6, m2 to 1e-5, others exactly."""
    want = expected(x)
    got = dict(zip(MOMENTS, row.tolist(), strict=False))
    bounds = dict.fromkeys(want, 0.0)
    bounds["sum_abs"] = 1e-6 * want["sum_abs"]
    bounds["sum_squares"] = 1e-6 * want["sum_squares"]
    bounds["m2"] = 1e-5 * want["m2"] + 1e-14 * want["sum_squares"]
    bounds["mean"] = 1e-6 * want["sum_abs"] / want["count"]
    for name, value in want.items():
        same = got[name] == value or (math.isnan(got[name]) and math.isnan(value))
        assert same or abs(got[name] - value) <= bounds[name], f"{name}: {got[name]}, not {value}"
