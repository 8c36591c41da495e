"""`Shard`: which part of a whole parameter a rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from transformer_engine.pytorch.parallel.groups import TensorParallel


@dataclass(frozen=True)
class Shard:
    """An equal part, along one dimension, of each section of a whole tensor.

    Attributes:
        ranks: that have the parts.
        dim: along which the tensor is shared.
        sections: their sizes in the whole tensor; () for one section.
    """

    ranks: TensorParallel
    dim: int
    sections: Sequence[int] = ()

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor, whose part has this one."""
        sizes = list(shape)
        sizes[self.dim] *= self.ranks.size
        return tuple(sizes)

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
