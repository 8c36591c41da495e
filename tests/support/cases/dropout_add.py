"""Shapes of dropout_add, and its definition in torch and plain Python integers."""

from __future__ import annotations

import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Whole vectors, columns that break them, tails, more than one part of rows, thin and empty ones.
SHAPES = [(4, 64), (2, 3, 40), (5, 33), (7, 1), (1, 1), (300, 24), (129, 264), (40,)]
EMPTY_SHAPES = [(0, 16), (3, 0)]
SANITIZE_SHAPES = [(5, 33), (40, 64)]
# (rows, cols) of the benchmark: large, medium, and a small model's.
BENCHMARK_SHAPES = [(16384, 8192), (8192, 4096), (8192, 768)]

_WORD = 0xFFFFFFFF


def philox(group: int, seed: int) -> list[int]:
    """Words of elements 4 * group ... 4 * group + 3."""
    counter = [group & _WORD, group >> 32, 0, 0]
    key = [seed & _WORD, seed >> 32 & _WORD]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            second >> 32 ^ counter[1] ^ key[0],
            second & _WORD,
            first >> 32 ^ counter[3] ^ key[1],
            first & _WORD,
        ]
        key = [key[0] + 0x9E3779B9 & _WORD, key[1] + 0xBB67AE85 & _WORD]
    return counter


def dropout_mask(shape: tuple[int, ...], seed: int, p: float) -> torch.Tensor:
    """True where element `i`'s word, as a number in [0, 1), is at least `p` (rounded to fp32)."""
    count = torch.Size(shape).numel()
    words = [word for group in range(-(-count // 4)) for word in philox(group, seed)]
    uniform = torch.tensor(words[:count], dtype=torch.float64) / 2**32
    return (uniform >= torch.tensor(p, dtype=torch.float32).double()).view(shape)


def _scale(p: float) -> torch.Tensor:
    return (1 / (1 - torch.tensor(p).double())).float()


def forward(x, bias, residual, keep, p) -> torch.Tensor:
    """The definition, each step rounded to fp32."""
    value = x.float() if bias is None else x.float() + bias.float()
    value = torch.where(keep, value * _scale(p), 0.0)
    if residual is None:
        return value.to(x.dtype)
    return (value + residual.float()).to(residual.dtype)


def gradient(dout, keep, p) -> torch.Tensor:
    """The gradient of `x` in fp32."""
    return torch.where(keep, dout.float() * _scale(p), 0.0)
