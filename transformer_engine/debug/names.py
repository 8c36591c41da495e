"""Names that configurations use: tensors of a layer, the GEMMs they belong to, the routing calls.

A GEMM has two operands and a result; an operand serves two GEMMs, one along its rows and one along
its columns:

    fprop   output [M, N] = activation [M, K] . weight^T
    dgrad   dgrad  [M, K] = gradient [M, N] . weight
    wgrad   wgrad  [N, K] = gradient^T . activation
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

NAMESPACE = "transformer_engine"


class GemmTensor(NamedTuple):
    """A tensor of a layer as features know it."""

    name: str
    quantizer: str  # which of the six `GemmQuantizers` handles it
    rowwise: str  # the GEMM that takes its rows, or gives it
    columnwise: str | None  # the GEMM that takes its columns; None for results

    @property
    def is_operand(self) -> bool:
        """Whether a GEMM takes it (else a GEMM gives it)."""
        return self.columnwise is not None


# In the order in which features are asked about them.
TENSORS = (
    GemmTensor("activation", "input", "fprop", "wgrad"),
    GemmTensor("weight", "weight", "fprop", "dgrad"),
    GemmTensor("output", "output", "fprop", None),
    GemmTensor("dgrad", "dgrad", "dgrad", None),
    GemmTensor("wgrad", "wgrad", "wgrad", None),
    GemmTensor("gradient", "grad_output", "dgrad", "wgrad"),
)

OPERANDS = {tensor.name: tensor for tensor in TENSORS if tensor.is_operand}

ROUTING_CALLS = (
    "inspect_tensor_enabled",
    "inspect_tensor_postquantize_enabled",
    "modify_tensor_enabled",
    "fp8_gemm_enabled",
)


# Stages of tensor parallelism before a Matmul, and behind it, that leave all ranks with one
# activation, and with one gradient.
_BEFORE, _BEHIND = ("replicated", "gather"), ("reduce", "reduce_scatter")


def replicated_tensors(stages: Sequence[Any], layer: str) -> tuple[str, ...]:
    """Which tensors of a GEMM all ranks of its tensor parallel group have alike.

    Args:
        stages: of a chain, in order.
        layer: name of the Matmul.
    """
    labels = ["", *(stage.label for stage in stages), ""]
    at = ["", *(getattr(stage, "name", "") for stage in stages)].index(layer)
    found = {"activation": labels[at - 1] in _BEFORE, "gradient": labels[at + 1] in _BEHIND}
    return tuple(tensor for tensor, is_replicated in found.items() if is_replicated)
