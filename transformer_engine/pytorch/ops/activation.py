"""Activations as operations: what `LayerNormMLP` calls by name.

Gated ones halve the last axis: `act(first half) * second half`. They compute in fp32.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from transformer_engine.pytorch.chain.stages import Activation
from transformer_engine.pytorch.dtypes import in_autocast_dtype
from transformer_engine.pytorch.kernels.activation import activation_kind, is_gated
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
        super().__init__(Activation(activation_kind(self.kind)))
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
