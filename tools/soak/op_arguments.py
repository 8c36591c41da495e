"""Random arguments for the operators: `OPERATORS` has a function for each that draws them.

Operators on tables of addresses (`delayed_scaling_update`, `gather_amax`) are left out: only
scaling states make such tables, and the memory that an address points to cannot be checked.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
E4M3, E5M2 = 5, 6
BLOCKS = (16 + E4M3, 32 + E4M3, 16 + E5M2)  # blocks of 1 x 128, of 128 x 128, of 1 x 128
MOMENTS = (0.0, 0.0, 0.0, 0.0, float("inf"), float("-inf"), 0.0, float("inf"), *[0.0] * 8)
_SPECIAL = (
    0.0,
    -0.0,
    float("inf"),
    float("-inf"),
    float("nan"),
    1e-45,
    3e-39,
    6e-8,
    448.0,
    65504.0,
)
_SIZES = (1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 32, 48, 64, 65, 128, 129, 160, 256, 384)


class Draw:
    """Draws shapes, dtypes and values; equal seeds draw the same."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.rows, self.cols = self.one(_SIZES), self.one(_SIZES)
        self.dtype = self.one(DTYPES)
        self.format = self.one((E4M3, E5M2))

    def one(self, choices: Any) -> Any:
        """A random element of `choices`."""
        return self.random.choice(choices)

    def flag(self) -> bool:
        """A random bool."""
        return self.random.random() < 0.5

    def maybe(self, value: Any) -> Any:
        """The value or, with probability one half, None."""
        return value if self.flag() else None

    def plain(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Values of random magnitude, some of them special values, maybe behind an offset."""
        shape = shape or (self.rows, self.cols)
        x = torch.randn(shape, generator=self.torch) * 10.0 ** self.random.randint(-6, 6)
        if x.numel() and self.random.random() < 0.3:
            for _ in range(self.random.randint(1, 4)):
                x.view(-1)[self.random.randrange(x.numel())] = self.one(_SPECIAL)
        return self.placed(x.to(dtype or self.dtype))

    def placed(self, x: torch.Tensor) -> torch.Tensor:
        """The same values, sometimes in memory that is not aligned to 16 bytes."""
        if self.random.random() < 0.7:
            return x
        offset = self.random.randint(1, 9)
        room = x.new_empty(x.numel() + offset)
        room[offset:] = x.reshape(-1)
        return room[offset:].view(x.shape)

    def positive(self, *shape: int) -> torch.Tensor:
        """Positive fp32 values, for scales and reciprocal deviations."""
        return torch.rand(shape or (1,), generator=self.torch) * 8.0 + 0.01

    def codes(self, *shape: int) -> torch.Tensor:
        """Random bytes."""
        shape = shape or (self.rows, self.cols)
        return torch.randint(0, 256, shape, generator=self.torch, dtype=torch.uint8)

    def moments(self) -> torch.Tensor | None:
        """A row for moments, or None."""
        return self.maybe(torch.tensor(MOMENTS, dtype=torch.float64))

    def dtype_or_none(self) -> torch.dtype | None:
        """The dtype of a bias gradient, or None."""
        return self.maybe(self.one(DTYPES))


def _fp8(d: Draw) -> tuple[Any, ...]:
    """Arguments of a fused cast: format, scale, amax, row-wise, column-wise."""
    return d.format, d.positive(), d.maybe(torch.zeros(1)), d.flag(), d.flag()


def _norm_forward(d: Draw) -> tuple[Any, ...]:
    layer, gamma = d.flag(), d.plain(d.cols)
    beta = d.plain(d.cols, dtype=gamma.dtype) if layer else None
    about = (d.plain(), gamma, beta, int(not layer), 1e-5, d.flag(), d.maybe(d.one(DTYPES)))
    return (*about, *_fp8(d), False, False, 0.0, None, None)


def _norm_backward(d: Draw) -> tuple[Any, ...]:
    layer, x = d.flag(), d.plain()
    mean = torch.randn(d.rows, generator=d.torch) if layer else None
    rest = (d.plain(d.cols), mean, d.positive(d.rows), int(not layer), d.flag())
    return (d.plain(), x, *rest, d.maybe(d.plain(dtype=x.dtype)))


def _activation(d: Draw, backward: bool) -> tuple[Any, ...]:
    kind = d.random.randrange(12)
    x = d.plain(d.rows, d.cols * (1 + kind % 2))
    scaled = (*_fp8(d), False, False, 0.0)
    numbers = (float(d.positive()), float(d.positive()), d.one((0.0, 1.0)))  # parameters of kind 11
    if backward:
        dy = d.plain()
        codes = (torch.zeros(d.cols, d.rows, dtype=torch.uint8), d.positive(2), d.format, d.flag())
        plain = ((dy if d.flag() else d.plain()), None, d.format, d.flag())
        again = d.one(((None, None, d.format, False), plain, codes))
        scaled = (*scaled, d.dtype_or_none(), None, None)
        return (dy, x, kind, d.flag(), *scaled, *numbers, *again)
    return (x, kind, d.flag(), *scaled, None, None, *numbers)


def _gemm(d: Draw) -> tuple[Any, ...]:
    m, n, k = (16 * d.random.randint(1, 6) for _ in range(3))
    out = d.one((torch.float32, torch.bfloat16))
    rest = (d.maybe(d.plain(n, dtype=out)), 0, None, None, False)
    if d.flag():
        pairs = (d.positive(2), d.positive(2), E4M3, d.format)
        return (d.codes(m, k), d.codes(n, k), out, *pairs, False, False, d.flag(), *rest)
    a_t, b_t = d.flag(), d.flag()
    a = d.plain(*((k, m) if a_t else (m, k)))
    b = d.plain(*((k, n) if b_t else (n, k)))
    return (a, b, out, None, None, -1, -1, a_t, b_t, False, *rest)


def _rope(d: Draw) -> tuple[Any, ...]:
    size = 2 * d.random.randint(1, 40)
    x = d.plain(d.random.randint(1, 20), d.random.randint(1, 4), d.random.randint(1, 4), size)
    length = max(x.shape[:2])
    freqs = torch.randn(length, 1, 1, 2 * d.random.randint(1, size // 2), generator=d.torch)
    return x, freqs, None, None, d.flag(), d.flag(), d.flag()


def _merge_parts(d: Draw) -> tuple[Any, ...]:
    lead = (d.random.randint(1, 3), d.random.randint(1, 20), d.random.randint(1, 4))
    part = d.plain(*lead, d.one(_SIZES))
    out = d.plain(*part.shape, dtype=d.one((part.dtype, torch.float32)))
    sums, part_sums = (d.plain(*lead, dtype=torch.float32) for _ in range(2))
    return out, sums, [part], [part_sums], [0], 1, d.flag()


def _softmax(d: Draw) -> tuple[Any, ...]:
    shape = (d.random.randint(1, 3), d.random.randint(1, 3), d.one(_SIZES), d.one(_SIZES))
    mask = d.maybe(torch.rand(shape[0], 1, *shape[2:], generator=d.torch) < 0.5)
    causal = (-1, 0, 0) if d.flag() else (-1, -1, 0)
    return (d.plain(*shape), mask, float(d.positive()), *causal)


def _labels(d: Draw, rows: int, classes: int) -> torch.Tensor:
    return torch.randint(-2, classes, (rows,), generator=d.torch, dtype=torch.int32)


def _cross_entropy(d: Draw) -> tuple[Any, ...]:
    x = d.plain()
    return x, _labels(d, *x.shape)


def _cross_entropy_back(d: Draw) -> tuple[Any, ...]:
    x = d.plain()
    factors = d.maybe(d.positive(x.shape[0]))
    return x, _labels(d, *x.shape), d.positive(x.shape[0]), factors, 0.1, 0.01


def _cross_entropy_codes(d: Draw) -> tuple[Any, ...]:
    x, *rest = _cross_entropy_back(d)
    more = d.random.randrange(3)
    codes = torch.zeros(len(x) + more, x.shape[1], dtype=torch.uint8)
    transposed = torch.zeros(x.shape[1], len(x) + more, dtype=torch.uint8)
    sides = (codes, d.maybe(transposed)) if d.flag() else (d.maybe(codes), transposed)
    first = d.random.randrange(more + 1)
    return x, *rest, d.positive(2), d.format, *sides, first, d.flag()


def _dropout_add(d: Draw) -> tuple[Any, ...]:
    x = d.plain()
    p = d.one((0.0, 0.1, 0.9))
    seed = torch.tensor([d.random.randrange(1 << 40)]) if p else None
    return x, d.maybe(d.plain(d.cols)), d.maybe(d.plain(dtype=x.dtype)), seed, p


def _dropout_back(d: Draw) -> tuple[Any, ...]:
    p = d.one((0.0, 0.5))
    seed = torch.tensor([d.random.randrange(1 << 40)]) if p else None
    return d.plain(), seed, p, d.maybe(d.one(DTYPES)), d.dtype_or_none()


def _quantize(d: Draw) -> tuple[Any, ...]:
    own = d.flag()
    scale = (d.positive(), d.maybe(torch.zeros(1)), None) if own else (None, None, d.positive(2))
    sides = (d.flag(), d.flag())
    return (d.plain(), d.format, *scale, *sides, d.dtype_or_none(), d.moments(), None)


OPERATORS: dict[str, Callable[[Draw], tuple[Any, ...]]] = {
    "quantize": _quantize,
    "quantize_blocks": lambda d: (
        *(d.plain(), d.one(BLOCKS), d.flag(), 0.0, d.flag(), d.flag(), d.dtype_or_none()),
        *(d.moments(), None),
    ),
    "dequantize": lambda d: (d.codes(), d.format, d.positive(2), d.one(DTYPES)),
    "transpose": lambda d: (d.codes(),),
    "amax": lambda d: (d.plain(),),
    "current_scales": lambda d: (d.plain(), d.format, d.flag(), 0.0),
    "norm_forward": _norm_forward,
    "norm_backward": _norm_backward,
    "activation_forward": lambda d: _activation(d, False),
    "activation_backward": lambda d: _activation(d, True),
    "gemm": _gemm,
    "rope": _rope,
    "merge_parts": _merge_parts,
    "softmax_forward": _softmax,
    "softmax_backward": lambda d: (
        *(d.plain(2, 3, d.rows, d.cols, dtype=d.dtype) for _ in range(2)),
        float(d.positive()),
    ),
    "cross_entropy_forward": _cross_entropy,
    "cross_entropy_backward_": _cross_entropy_back,
    "cross_entropy_backward_codes_": _cross_entropy_codes,
    "dropout_add_forward": _dropout_add,
    "dropout_add_backward": _dropout_back,
    "moments": lambda d: (d.plain(), torch.tensor(MOMENTS, dtype=torch.float64), None),
    "spread": lambda d: (d.positive(d.cols), torch.rand(d.rows, d.cols), 4),
}
