"""The activations of `LayerNormMLP` as operations.

Gated activations halve the last axis: `act(a) * b`, where `a` is the first half and `b` the second.
All compute in fp32.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from transformer_engine.pytorch.chain.stages import Activation
from transformer_engine.pytorch.dtypes import in_autocast_dtype
from transformer_engine.pytorch.kernels.activation import (
    CLAMPED_SWIGLU,
    DEFAULT_PARAMETERS,
    ActivationParameters,
    activation_kind,
    activation_parameters,
    is_gated,
)
from transformer_engine.pytorch.module.arguments import check_sizes
from transformer_engine.pytorch.module.inputs import check_plain, check_tensors
from transformer_engine.pytorch.module.single_stage import SingleStageModule
from transformer_engine.pytorch.ops.operation import FusibleOperation


class _Activation(SingleStageModule, FusibleOperation):
    """Base of activations; the result has the dtype of the input, or that of `torch.autocast`.

    Args:
        cache_quantized_input: save the input for the backward in FP8; not implemented.

    Raises:
        NotImplementedError: `cache_quantized_input=True`.
    """

    kind: ClassVar[str]

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        self._build(DEFAULT_PARAMETERS, cache_quantized_input)

    def _build(self, numbers: ActivationParameters, cache_quantized_input: bool) -> None:
        super().__init__(Activation(activation_kind(self.kind), numbers))
        if cache_quantized_input:
            raise NotImplementedError(
                f"[{type(self).__name__}] cache_quantized_input=True: the input is kept as it is"
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the activation.

        Args:
            x: `(..., n)`, fp32, fp16 or bf16; `n` is even for gated kinds.
        """
        return self.run(_checked(self, x, is_gated(activation_kind(self.kind))))


def _checked(op: FusibleOperation, x: torch.Tensor, gated: bool) -> torch.Tensor:
    """The input, in the dtype of `torch.autocast` where that is on."""
    kind = type(op).__name__
    check_tensors(kind, x=x)
    check_plain(kind, x=x)
    if x.ndim == 0 or (gated and x.shape[-1] % 2):
        raise ValueError(f"[{kind}] expected x of shape (..., even), got {tuple(x.shape)}")
    return in_autocast_dtype(x)


class GELU(_Activation):
    """The tanh approximation of GELU.

    >>> GELU()(torch.tensor([0.0, 3.0]))
    tensor([0.0000, 2.9964])
    """

    kind = "gelu"


class GEGLU(_Activation):
    """`gelu(a) * b`."""

    kind = "geglu"


class GLU(_Activation):
    """`sigmoid(a) * b`. `torch.nn.functional.glu` takes the halves in the opposite order.

    >>> GLU()(torch.tensor([0.0, 3.0]))
    tensor([1.5000])
    """

    kind = "glu"


class QGELU(_Activation):
    """`x * sigmoid(1.702 x)`."""

    kind = "qgelu"


class QGEGLU(_Activation):
    """`qgelu(a) * b`."""

    kind = "qgeglu"


class ReLU(_Activation):
    """`max(x, 0)`."""

    kind = "relu"


class ReGLU(_Activation):
    """`relu(a) * b`."""

    kind = "reglu"


class SReLU(_Activation):
    """`relu(x)^2`."""

    kind = "srelu"


class SReGLU(_Activation):
    """`srelu(a) * b`."""

    kind = "sreglu"


class SiLU(_Activation):
    """`x * sigmoid(x)`."""

    kind = "silu"


class _Interleaved(_Activation):
    """Base of gated activations whose halves may come in blocks."""

    glu_interleave_size: int | None = None

    def _interleave(self, size: int | None) -> None:
        if size is not None:
            check_sizes(type(self).__name__, None, glu_interleave_size=size)
        self.glu_interleave_size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the activation.

        Args:
            x: `(..., n)`, fp32, fp16 or bf16; `n` is even, and divisible by twice the block size.

        Returns:
            `(..., n / 2)`, in the dtype of `x`, or of `torch.autocast` where that is on.

        Raises:
            ValueError: a last size that does not fit.
            TypeError: not a dense tensor.
        """
        block = self.glu_interleave_size
        if block is None:
            return super().forward(x)
        x = _checked(self, x, gated=True)
        if x.shape[-1] % (2 * block):
            raise ValueError(
                f"[{type(self).__name__}] expected a last size divisible by {2 * block}, twice "
                f"glu_interleave_size, got {tuple(x.shape)}"
            )
        return super().forward(x.unflatten(-1, (-1, 2, block)).transpose(-3, -2).flatten(-3))


class SwiGLU(_Interleaved):
    """`silu(a) * b`.

    Args:
        cache_quantized_input: as in all activations.
        glu_interleave_size: None: `a` is the first half of the last axis. Else the axis consists of
            blocks of this size, which belong to `a` and `b` in turn.

    Raises:
        NotImplementedError: `cache_quantized_input=True`.
        ValueError: a block size below 1.
        TypeError: a block size that is not an int.

    >>> SwiGLU()(torch.tensor([1.0, 2.0]))
    tensor([1.4621])
    """

    kind = "swiglu"

    def __init__(
        self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self._interleave(glu_interleave_size)


class ClampedSwiGLU(_Interleaved):
    """`g * sigmoid(alpha g) * (h + glu_linear_offset)` with both halves clamped, as in gpt-oss.

    `g` is the first half, clamped to at most `limit`; `h` is the second half, clamped to `-limit`
    to `limit`. Gradients are zero where a value was clamped.

    Args:
        limit: above 0.
        alpha: above 0; 1.702 makes the sigmoid unit nearly a GELU.
        glu_linear_offset: added to the second half.
        cache_quantized_input: as in all activations.
        glu_interleave_size: as in `SwiGLU`.

    Raises:
        NotImplementedError: `cache_quantized_input=True`.
        TypeError: arguments that are not numbers.
        ValueError: numbers out of range.

    >>> ClampedSwiGLU(alpha=1.0)(torch.tensor([0.0, 20.0, 5.0, 2.0]))
    tensor([ 0.0000, 20.9809])
    """

    kind = "clamped_swiglu"

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        params = {"limit": limit, "alpha": alpha, "glu_linear_offset": glu_linear_offset}
        numbers = activation_parameters(CLAMPED_SWIGLU, params, type(self).__name__)
        self._build(numbers, cache_quantized_input)
        self._interleave(glu_interleave_size)
