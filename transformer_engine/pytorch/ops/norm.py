"""Norms as operations."""

from __future__ import annotations

import torch

from transformer_engine.pytorch.module.inputs import check_plain, check_tensors
from transformer_engine.pytorch.module.l2norm import L2Normalization as _L2Normalization
from transformer_engine.pytorch.module.layernorm import LayerNorm as _LayerNorm
from transformer_engine.pytorch.module.norms import checked_eps
from transformer_engine.pytorch.module.rmsnorm import RMSNorm as _RMSNorm
from transformer_engine.pytorch.module.settings import HasSettings, setting
from transformer_engine.pytorch.ops.operation import FusibleOperation


class LayerNorm(_LayerNorm, FusibleOperation):
    """`transformer_engine.pytorch.LayerNorm`, as an operation."""


class RMSNorm(_RMSNorm, FusibleOperation):
    """`transformer_engine.pytorch.RMSNorm`, as an operation."""


class L2Normalization(HasSettings, FusibleOperation):
    """`y = x / sqrt(sum(x^2) + eps)` over the last axis, in fp32. It has no parameters.

    Args:
        eps: added to the sum of squares.
        seq_length: has no effect.
        micro_batch_size: has no effect.

    Raises:
        TypeError: `eps` is not a number.
        ValueError: it is below 0.

    >>> L2Normalization()(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """

    eps: float = setting(checked_eps)

    def __init__(
        self,
        *,
        eps: float = 1e-6,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self._by_size: dict[int, _L2Normalization] = {}
        self.eps = eps

    def is_built(self) -> bool:
        """See `HasSettings`."""
        return "_by_size" in self.__dict__

    def rebuild_chain(self) -> None:
        """Drop the norms that were made with the previous `eps`."""
        self._by_size.clear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise over the last axis.

        Args:
            x: `(..., n)`, fp32, fp16 or bf16.

        Returns:
            The shape and the dtype of `x`.

        Raises:
            ValueError: no axis to normalise over, or an empty one.
            TypeError: not a dense tensor.
        """
        check_tensors("L2Normalization", x=x)
        check_plain("L2Normalization", x=x)
        if x.ndim == 0 or x.shape[-1] == 0:
            raise ValueError(
                f"[L2Normalization] expected x of shape (..., n), n > 0, got {tuple(x.shape)}"
            )
        size = x.shape[-1]
        if size not in self._by_size:
            self._by_size[size] = _L2Normalization(size, self.eps)
        return self._by_size[size](x)

    def extra_repr(self) -> str:
        """The setting."""
        return f"eps={self.eps}"
