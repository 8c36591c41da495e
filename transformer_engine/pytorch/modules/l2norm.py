"""`L2Normalization`: y = x / sqrt(sum(x^2) + eps)."""

from __future__ import annotations

import torch

from transformer_engine.pytorch.modules.norms import NormChain
from transformer_engine.pytorch.stages import Norm


class L2Normalization(NormChain):
    """Scale to length 1 over the last axis, in fp32. It has no parameters.

    A root mean square norm is the same but for the number of elements: `eps` is divided by it, and
    gamma by its root.

    Args:
        hidden_size: size of the last axis.
        eps: added to the sum of squares.

    >>> L2Normalization(8)(torch.randn(2, 8)).norm(dim=-1).round(decimals=4)
    tensor([1., 1.])
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(Norm("RMSNorm", eps / hidden_size, zero_centered=False))
        self.hidden_size = hidden_size
        self.eps = eps

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Normalise `(..., hidden_size)` over the last axis; shape and dtype stay."""
        gamma = inp.new_full((self.hidden_size,), self.hidden_size**-0.5, dtype=torch.float32)
        return self.normalised(inp, gamma, None, inp.dtype)

    def extra_repr(self) -> str:
        """Size and setting."""
        return f"{self.hidden_size}, eps={self.eps}"
