"""`Fp8Padding` and `Fp8Unpadding`: add zero rows behind each part of the rows, and remove them.

FP8 GEMMs need numbers of rows that are multiples of 16. `GroupedLinear` pads by itself where it
must; these modules are for programs that pad once around several layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch.chain.stages.matmul import TOKEN_ALIGNMENT
from transformer_engine.pytorch.module.arguments import check_sizes, list_of_ints
from transformer_engine.pytorch.module.inputs import check_tensors


class _Padding(nn.Module):
    """Base of both modules."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.align_size = TOKEN_ALIGNMENT if align_size is None else align_size
        sizes = {"num_gemms": num_gemms, "align_size": self.align_size}
        check_sizes(type(self).__name__, None, 1, **sizes)

    def _ints(self, m_splits: Any) -> list[int]:
        splits = list_of_ints(type(self).__name__, None, m_splits=m_splits)
        if min(splits, default=0) < 0:
            raise ValueError(
                f"[{type(self).__name__}] expected m_splits of 0 or more, got {splits}"
            )
        return splits

    def _padded(self, m_splits: list[int]) -> list[int]:
        return [-(-rows // self.align_size) * self.align_size for rows in m_splits]

    def _check(self, inp: torch.Tensor, m_splits: list[int], rows: int) -> None:
        check_tensors(type(self).__name__, inp=inp)
        if len(m_splits) != self.num_gemms or inp.ndim != 2 or inp.shape[0] != rows:
            raise ValueError(
                f"[{type(self).__name__}] expected inp of {rows} rows for {self.num_gemms} parts, "
                f"got {tuple(inp.shape)} for m_splits {m_splits}"
            )

    def extra_repr(self) -> str:
        """Parts and size."""
        return f"num_gemms={self.num_gemms}, align_size={self.align_size}"


class Fp8Padding(_Padding):
    """Adds zero rows behind each part, up to a multiple of `align_size`.

    Args:
        num_gemms: number of parts.
        align_size: rows of a padded part are a multiple of it; None is what FP8 needs, 16.

    Raises:
        ValueError: `num_gemms` or `align_size` below 1.

    >>> padded, splits = Fp8Padding(2)(torch.ones(5, 8), [3, 2])
    >>> padded.shape, splits
    (torch.Size([32, 8]), [16, 16])
    """

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """Pad.

        Args:
            inp: `[rows, features]`.
            m_splits: rows of each part, in order.

        Returns:
            `(padded, rows of its parts)`; `inp` itself where no rows are missing.
        """
        splits = self._ints(m_splits)
        self._check(inp, splits, sum(splits))
        padded = self._padded(splits)
        if padded == splits:
            return inp, padded
        pieces: list[torch.Tensor] = []
        for part, rows in zip(inp.split(splits), padded, strict=True):
            pieces += [part, inp.new_zeros(rows - part.shape[0], inp.shape[1])]
        return torch.cat(pieces), padded


class Fp8Unpadding(_Padding):
    """Removes the rows that `Fp8Padding` has added.

    Args:
        num_gemms: number of parts.
        align_size: the `align_size` of that `Fp8Padding`.

    Raises:
        ValueError: `num_gemms` or `align_size` below 1.

    >>> Fp8Unpadding(2)(torch.ones(32, 8), [3, 2]).shape
    torch.Size([5, 8])
    """

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> torch.Tensor:
        """Unpad.

        Args:
            inp: `[padded rows, features]`.
            m_splits: rows of each part without padding, in order.

        Returns:
            `[rows, features]`; `inp` itself where nothing was added.
        """
        splits = self._ints(m_splits)
        padded = self._padded(splits)
        self._check(inp, splits, sum(padded))
        if padded == splits:
            return inp
        parts = zip(inp.split(padded), splits, strict=True)
        return torch.cat([part[:rows] for part, rows in parts])
