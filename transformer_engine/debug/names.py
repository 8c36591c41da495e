"""Names in configurations: the tensors of a layer, their GEMMs, and the routing calls.

A GEMM has two operands and a result. Each operand is used by two GEMMs: one sums along its rows
(row-wise), the other along its columns (column-wise):

    fprop   output [M, N] = activation [M, K] . weight^T
    dgrad   dgrad  [M, K] = gradient [M, N] . weight
    wgrad   wgrad  [N, K] = gradient^T . activation
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

NAMESPACE = "transformer_engine"


class GemmTensor(NamedTuple):
    """A tensor of a layer, by the name that configurations use."""

    name: str
    quantizer: str  # the attribute of `GemmQuantizers` that holds the quantizer
    rowwise: str  # the GEMM that takes it row-wise, or whose result it is
    columnwise: str | None  # the GEMM that takes it column-wise; None for results

    @property
    def is_operand(self) -> bool:
        """Whether it is an operand of GEMMs, not the result of one."""
        return self.columnwise is not None


# Features are asked about the tensors in this order.
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


# If the stage before a Matmul is one of the first two, all ranks have the same activation. If the
# stage after it is one of the last two, all ranks have the same gradient.
_BEFORE, _BEHIND = ("replicated", "gather"), ("reduce", "reduce_scatter")


def replicated_tensors(stages: Sequence[Any], layer: str) -> tuple[str, ...]:
    """Return the operands of the Matmul `layer` that are the same on all tensor parallel ranks."""
    labels = ["", *(stage.label for stage in stages), ""]
    at = ["", *(getattr(stage, "name", "") for stage in stages)].index(layer)
    found = {"activation": labels[at - 1] in _BEFORE, "gradient": labels[at + 1] in _BEHIND}
    return tuple(tensor for tensor, is_replicated in found.items() if is_replicated)
