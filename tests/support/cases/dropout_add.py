"""Shapes of dropout_add, and its definition in torch and plain Python integers."""

from __future__ import annotations

import math

import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Whole vectors, rows that are no multiple of a vector, tails, more than one block of rows, thin
# tensors.
SHAPES = [(4, 64), (2, 3, 40), (5, 33), (7, 1), (1, 1), (300, 24), (129, 264), (40,)]
EMPTY_SHAPES = [(0, 16), (3, 0)]
SANITIZE_SHAPES = [(5, 33), (40, 64)]
# (rows, cols) of the benchmark: large, medium, and the width of a small model.
BENCHMARK_SHAPES = [(16384, 8192), (8192, 4096), (8192, 768)]

_WORD = 0xFFFFFFFF


def philox(group: int, seed: int) -> list[int]:
    """Returns four 32-bit words: 16 bits for each of the elements 8 * group ... 8 * group + 7."""
    counter = [group & _WORD, group >> 32, 0, 0]
    key = [seed & _WORD, seed >> 32 & _WORD]
    for _ in range(7):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            second >> 32 ^ counter[1] ^ key[0],
            second & _WORD,
            first >> 32 ^ counter[3] ^ key[1],
            first & _WORD,
        ]
        key = [key[0] + 0x9E3779B9 & _WORD, key[1] + 0xBB67AE85 & _WORD]
    return counter


def dropout_bits(first: int, count: int, seed: int) -> list[int]:
    """Returns the 16 random bits of each of `count` elements from element `first` on."""
    groups = range(first // 8, -(-(first + count) // 8))
    halves = [bits for i in groups for w in philox(i, seed) for bits in (w & 0xFFFF, w >> 16)]
    return halves[first % 8 :][:count]


def threshold(p: float) -> int:
    """Returns `p` in units of 2^-16: rounded to fp32 first, then rounded up."""
    return min(math.ceil(torch.tensor(p, dtype=torch.float32).item() * 2**16), 2**16 - 1)


def dropout_mask(shape: tuple[int, ...], seed: int, p: float) -> torch.Tensor:
    """True where the bits of an element are at least the threshold."""
    bits = dropout_bits(0, torch.Size(shape).numel(), seed)
    return (torch.tensor(bits, dtype=torch.int64) >= threshold(p)).view(shape)


def _scale(p: float) -> torch.Tensor:
    return torch.tensor(2**16 / (2**16 - threshold(p)), dtype=torch.float64).float()


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
