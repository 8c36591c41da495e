"""Activations as operations: what `LayerNormMLP` calls by name.

Gated ones halve the last axis: `act(first half) * second half`. They compute in fp32.
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
from transformer_engine.pytorch.module.inputs import refuse_input
from transformer_engine.pytorch.module.single_stage import SingleStageModule
from transformer_engine.pytorch.ops.operation import FusibleOperation


class _Activation(SingleStageModule, FusibleOperation):
    """An activation without parameters; the result has the dtype of the input, or autocast's.

    Args:
        cache_quantized_input: keep the input for the backward in FP8; not implemented.

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
        """Apply it.

        Args:
            x: `(..., n)`, fp32, fp16 or bf16; `n` is even for gated kinds.
        """
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
            refuse_input(type(self).__name__, "x", x, None)
        if x.ndim == 0 or (is_gated(activation_kind(self.kind)) and x.shape[-1] % 2):
            raise ValueError(
                f"[{type(self).__name__}] expected x of shape (..., even), got {tuple(x.shape)}"
            )
        return self.run(in_autocast_dtype(x))


class GELU(_Activation):
    """The tanh approximation of GELU.

    >>> GELU()(torch.tensor([0.0, 3.0]))
    tensor([0.0000, 2.9964])
    """

    kind = "gelu"


class GEGLU(_Activation):
    """`gelu(a) * b`."""

    kind = "geglu"


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


class SwiGLU(_Activation):
    """`silu(a) * b`."""

    kind = "swiglu"


class ClampedSwiGLU(_Activation):
    """`g * sigmoid(alpha g) * (h + glu_linear_offset)` with both halves clamped, as in gpt-oss.

    `g` is the first half, at most `limit`; `h` the second, from `-limit` to `limit`. Gradients are
    zero where a half is cut off.

    Args:
        limit: above 0.
        alpha: above 0; 1.702 makes the sigmoid unit nearly a GELU.
        glu_linear_offset: added to the second half.
        cache_quantized_input: as in all activations.

    Raises:
        TypeError: numbers that are none.
        ValueError: numbers that cannot be.

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
    ) -> None:
        params = {"limit": limit, "alpha": alpha, "glu_linear_offset": glu_linear_offset}
        numbers = activation_parameters(CLAMPED_SWIGLU, params, "ClampedSwiGLU")
        self._build(numbers, cache_quantized_input)
