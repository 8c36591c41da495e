"""DropPath: in training, whole samples of a residual branch are left out."""

from __future__ import annotations

import torch
from torch import nn

from transformer_engine.pytorch.module.arguments import check_numbers


class DropPath(nn.Module):
    """Zero a sample's branch with probability `drop_prob`; scale the others by `1/(1-drop_prob)`.

    Args:
        drop_prob: in [0, 1).
        batch_dim: the dimension of samples.
    """

    def __init__(self, drop_prob: float = 0.0, batch_dim: int = 0) -> None:
        super().__init__()
        check_numbers("DropPath", None, drop_prob=drop_prob)
        if not 0.0 <= drop_prob < 1.0:
            raise ValueError(f"[DropPath] expected 0 <= drop_prob < 1, got {drop_prob}")
        self.drop_prob = drop_prob
        self.batch_dim = batch_dim

    def forward(
        self, hidden_state: torch.Tensor, cu_seqlens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Drop samples, or with `cu_seqlens` `[batch + 1]` sequences of packed tokens."""
        if self.drop_prob == 0.0 or not self.training:
            return hidden_state
        samples = hidden_state.shape[self.batch_dim]
        if cu_seqlens is not None:
            samples = cu_seqlens.shape[0] - 1
        keep = 1.0 - self.drop_prob
        factor = hidden_state.new_empty(samples).bernoulli_(keep).div_(keep)
        if cu_seqlens is not None:
            token = torch.arange(hidden_state.shape[0], device=hidden_state.device)
            sequence = torch.searchsorted(cu_seqlens[1:].to(torch.int64), token, right=True)
            factor = factor[sequence.clamp_(max=samples - 1)]
        shape = [1] * hidden_state.dim()
        shape[self.batch_dim] = -1
        return hidden_state * factor.view(shape)

    def extra_repr(self) -> str:
        """Probability."""
        return f"drop_prob={self.drop_prob}"
