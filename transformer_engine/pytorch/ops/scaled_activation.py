"""Activations whose result is multiplied by a scale for each row, which is an extra input.

In a mixture of experts, the scales are the probabilities of tokens.
"""

from __future__ import annotations

import torch

from transformer_engine.pytorch.module.inputs import check_tensors
from transformer_engine.pytorch.ops.activation import ClampedSwiGLU, SReLU, SwiGLU, _Activation


class _Scaled(_Activation):
    """Base: the activation of the class behind it, times the scales."""

    num_extra_inputs = 1

    def forward(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Apply the activation.

        Args:
            x: as the activation without scales takes it.
            scales: of the shape of `x` without its last axis, fp32, fp16 or bf16.

        Returns:
            Of the shape that the activation without scales returns, in the dtype of `x`, or of
            `torch.autocast` where that is on.

        Raises:
            ValueError: shapes that do not fit.
            TypeError: arguments that are not dense tensors.
        """
        kind = type(self).__name__
        check_tensors(kind, scales=scales)
        if isinstance(x, torch.Tensor) and scales.shape != x.shape[:-1]:
            raise ValueError(
                f"[{kind}] expected scales of shape {tuple(x.shape[:-1])}, one for each row, "
                f"got {tuple(scales.shape)}"
            )
        out = super().forward(x)
        return (out * scales.unsqueeze(-1)).to(out.dtype)


class ScaledSReLU(_Scaled, SReLU):
    """`relu(x)^2`, with each row multiplied by a scale.

    >>> ScaledSReLU()(torch.tensor([[1.0, 2.0], [1.0, 2.0]]), torch.tensor([1.0, 0.5]))
    tensor([[1.0000, 4.0000],
            [0.5000, 2.0000]])
    """

    def __init__(self) -> None:
        super().__init__()


class ScaledSwiGLU(_Scaled, SwiGLU):  # type: ignore[misc]
    """`silu(a) * b`, with each row multiplied by a scale.

    Args:
        glu_interleave_size: see `SwiGLU`.

    Raises:
        ValueError: a block size below 1.
        TypeError: a block size that is not an int.

    >>> ScaledSwiGLU()(torch.tensor([[1.0, 2.0], [1.0, 2.0]]), torch.tensor([1.0, 0.5]))
    tensor([[1.4621],
            [0.7311]])
    """

    def __init__(self, *, glu_interleave_size: int | None = None) -> None:
        super().__init__(glu_interleave_size=glu_interleave_size)


class ScaledClampedQGeGLU(_Scaled, ClampedSwiGLU):  # type: ignore[misc]
    """`ClampedSwiGLU`, with each row multiplied by a scale.

    Args:
        glu_interleave_size: see `SwiGLU`.
        limit: see `ClampedSwiGLU`.
        alpha: see `ClampedSwiGLU`.
        glu_linear_offset: see `ClampedSwiGLU`.

    Raises:
        ValueError: numbers out of range.
        TypeError: arguments that are not numbers.

    >>> ScaledClampedQGeGLU(alpha=1.0)(torch.tensor([[20.0, 2.0]]), torch.tensor([0.5]))
    tensor([[10.4904]])
    """

    def __init__(
        self,
        *,
        glu_interleave_size: int | None = None,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        super().__init__(
            limit=limit,
            alpha=alpha,
            glu_linear_offset=glu_linear_offset,
            glu_interleave_size=glu_interleave_size,
        )
