"""Masks, windows and shapes of softmax that the tests and the benchmark share."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """Scores of `shape`, an optional mask of `mask` sizes, and a window."""

    shape: tuple[int, int, int, int]
    mask: tuple[int, int, int, int] | None = None
    left: int = -1
    right: int = -1
    diagonal: int = 0

    @property
    def window(self) -> tuple[int, int, int]:
        """The arguments of the op that follow `scale`."""
        return self.left, self.right, self.diagonal

    def make_mask(self, device: str) -> torch.Tensor | None:
        """Makes a mask that hides a random third of the keys, and all keys of the first query."""
        if self.mask is None:
            return None
        mask = torch.rand(self.mask) < 1 / 3
        mask[..., :1, :] = True
        return mask.to(device)

    def __str__(self) -> str:
        parts = ["x".join(map(str, self.shape))]
        if self.mask:
            parts.append("mask" + "x".join(map(str, self.mask)))
        if self.window != (-1, -1, 0):
            parts.append("window" + ",".join(map(str, self.window)))
        return "-".join(parts)


# Numbers of keys around the limits of each kernel: one access per lane (256 keys of 16 bits, 128 of
# 32), one warp per row (2048, 1024), several warps per row, and the loop (above 32768, or above
# 16384 where rows are not aligned).
KEYS = [1, 7, 8, 64, 127, 136, 256, 264, 1000, 1024, 1032, 1500, 2048, 2056, 2049, 6000, 16400]
PLAIN = [Case((1, 2, 3, keys)) for keys in KEYS] + [
    Case((1, 1, 2, 17001)),
    Case((1, 1, 2, 32776)),
    Case((3, 5, 7, 40)),
    Case((1, 1, 1, 33000)),
]
MASKED = [
    Case((2, 4, 9, 72), mask=(2, 1, 9, 72)),
    Case((2, 4, 9, 72), mask=(2, 1, 1, 72)),
    Case((2, 8, 5, 1032), mask=(1, 1, 5, 1032)),
    Case((2, 3, 9, 33), mask=(2, 3, 9, 33)),
    Case((2, 3, 9, 33), mask=(1, 3, 1, 33)),
    Case((2, 2, 9, 40), mask=(2, 1, 9, 1)),
    Case((2, 2, 9, 40), mask=(1, 1, 1, 1)),
    Case((2, 4, 3, 2050), mask=(2, 1, 3, 2050)),
    Case((1, 4, 3, 4096), mask=(1, 1, 3, 4096)),
    Case((1, 2, 2, 33000), mask=(1, 1, 2, 33000)),
]
WINDOWED = [
    Case((1, 2, 40, 40), right=0),
    Case((1, 2, 33, 300), right=0, diagonal=267),
    Case((1, 2, 300, 65), right=0, diagonal=-235),
    Case((1, 2, 100, 333), left=5, right=0),
    Case((1, 2, 100, 136), left=17, right=30, diagonal=3),
    Case((1, 1, 20, 2100), left=64, right=0, diagonal=2080),
    Case((1, 1, 9, 40), left=3, diagonal=100),
    Case((1, 1, 9, 40), right=0, diagonal=-100),
    Case((2, 4, 24, 24), mask=(2, 1, 1, 24), right=0),
    Case((1, 1, 3, 33000), left=70, right=1, diagonal=32000),
    Case((1, 4, 64, 2048), mask=(1, 1, 64, 2048), left=99, right=0, diagonal=1984),
]
ALL = PLAIN + MASKED + WINDOWED
SANITIZE = [
    Case((1, 4, 3, 40), mask=(1, 1, 3, 40)),
    Case((1, 1, 5, 33), right=0),
    Case((1, 1, 2, 2056), left=9, right=0, diagonal=2000),
    Case((1, 1, 1, 16401)),
]

_SQUARE = (4, 32, 2048, 2048)
BENCHMARK = [
    Case(_SQUARE),
    Case(_SQUARE, mask=(4, 1, 2048, 2048)),
    Case(_SQUARE, mask=(4, 1, 1, 2048)),
    Case(_SQUARE, right=0),
    Case((8, 12, 1024, 1024), right=0),
    Case((1, 32, 4096, 4096), mask=(1, 1, 4096, 4096)),
    Case((1, 16, 8192, 8192), right=0),
    Case((1, 1, 2048, 65536)),
    Case((4, 16, 1023, 1023)),
]


def hidden(case: Case, mask: torch.Tensor | None) -> torch.Tensor:
    """True where a key is not seen, over the whole shape."""
    _, _, queries, keys = case.shape
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - case.diagonal
    outside = torch.zeros(queries, keys, dtype=torch.bool)
    if case.left >= 0:
        outside |= distance < -case.left
    if case.right >= 0:
        outside |= distance > case.right
    outside = outside.expand(case.shape)
    return outside if mask is None else outside | mask.cpu()


def reference(x: torch.Tensor, scale: float, hide: torch.Tensor) -> torch.Tensor:
    """The definition in float64; rows that see no finite score are zero."""
    scores = (x.float() * scale).double().masked_fill(hide, -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores, -1).masked_fill(blind, 0.0)
