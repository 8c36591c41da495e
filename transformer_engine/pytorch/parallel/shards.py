"""`Shard`: how the ranks divide a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from transformer_engine.pytorch.parallel.groups import TensorParallel


@dataclass(frozen=True)
class Shard:
    """An equal part, along one dimension, of each section of a whole tensor.

    Attributes:
        ranks: the ranks that have the parts.
        dim: the dimension along which the tensor is divided.
        sections: sizes of the sections in the whole tensor; () for one section.
    """

    ranks: TensorParallel
    dim: int
    sections: Sequence[int] = ()

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor from that of a part."""
        sizes = list(shape)
        sizes[self.dim] *= self.ranks.size
        return tuple(sizes)

    def whole(self, stack: torch.Tensor) -> torch.Tensor:
        """Assemble the whole tensor from `[ranks, ...]`, the parts of all ranks.

        >>> ranks = TensorParallel("Linear", "fc", None, 2)
        >>> Shard(ranks, 0, (4, 2)).whole(torch.tensor([[0, 1, 4], [2, 3, 5]])).tolist()
        [0, 1, 2, 3, 4, 5]
        """
        sizes = list(self.sections or [stack.shape[self.dim + 1] * self.ranks.size])
        parts = stack.split([size // self.ranks.size for size in sizes], self.dim + 1)
        return torch.cat([x for part in parts for x in part.unbind()], self.dim)

    def of(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of a rank.

        >>> ranks = TensorParallel("Linear", "fc", None, 2)
        >>> Shard(ranks, 0, (4, 2)).of(torch.arange(6), 1).tolist()
        [2, 3, 5]
        """
        sections = whole.split(list(self.sections or [whole.shape[self.dim]]), self.dim)
        return torch.cat(
            [part.chunk(self.ranks.size, self.dim)[rank] for part in sections], self.dim
        )
