"""`L2Normalization`: y = x / sqrt(sum(x^2) + eps).

The stage of RMSNorm computes it. With n elements, sum(x^2) + eps = n (mean(x^2) + eps / n), so y is
RMSNorm with eps / n and a constant gamma of 1 / sqrt(n).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch.capture import is_capturing
from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.chain.flow import joins_chains
from transformer_engine.pytorch.chain.stages import Norm
from transformer_engine.pytorch.module.norms import checked_eps
from transformer_engine.pytorch.module.settings import setting
from transformer_engine.pytorch.module.single_stage import SingleStageModule


@joins_chains
class L2Normalization(SingleStageModule):
    """Scale to length 1 over the last axis, in fp32. It has no parameters.

    Args:
        hidden_size: size of the last axis.
        eps: added to the sum of squares.

    Raises:
        TypeError: `eps` is not a number.
        ValueError: it is below 0.

    >>> L2Normalization(8)(torch.randn(2, 8)).norm(dim=-1).round(decimals=4)
    tensor([1., 1.])
    """

    eps: float = setting(checked_eps)

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.chain = self._build_chain()
        self._gammas: dict[torch.device, torch.Tensor] = {}

    def _build_chain(self) -> Chain:
        return Chain.of(Norm("RMSNorm", self.eps / self.hidden_size, zero_centered=False))

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Normalise `(..., hidden_size)` over the last axis; shape and dtype stay."""
        return self.run(inp)

    def dtype_and_parameters(
        self, like: torch.Tensor
    ) -> tuple[torch.dtype, Sequence[torch.Tensor | None]]:
        """See `SingleStageModule`."""
        return like.dtype, (self._gamma(like), None)

    def _gamma(self, like: torch.Tensor) -> torch.Tensor:
        """Gamma, cached by device. Compiled and captured graphs make it in each call instead."""
        compiling = torch.compiler.is_compiling() or type(like) is not torch.Tensor
        known = None if compiling else self._gammas.get(like.device)
        if known is not None:
            return known
        size, value = (self.hidden_size,), self.hidden_size**-0.5
        if compiling or is_capturing():
            return like.new_full(size, value, dtype=torch.float32)
        with torch.inference_mode(False):
            # A copy from pageable memory blocks the host, so gamma is ready for every stream.
            gamma = torch.full(size, value, dtype=torch.float32, device="cpu").to(like.device)
        self._gammas[like.device] = gamma
        return gamma

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_gammas": {}}

    def extra_repr(self) -> str:
        """Size and setting."""
        return f"{self.hidden_size}, eps={self.eps}"
