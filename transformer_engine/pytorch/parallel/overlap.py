"""Which collectives of a layer overlap with GEMMs, as requested by the layer's `ub_*` arguments."""

from __future__ import annotations

from typing import Any, NamedTuple


class Overlap(NamedTuple):
    """Which collectives of a layer run in chunks, overlapped with the GEMM before or after them.

    Attributes:
        gather: all-gather of the input of a column-parallel GEMM.
        scatter: reduce-scatter of the output of a row-parallel GEMM.
        grad_gather: all-gather of the output gradient of a row-parallel GEMM.
        grad_scatter: reduce-scatter of the input gradient of a column-parallel GEMM. Otherwise it
            overlaps with the GEMM of the weight gradient.
    """

    gather: bool = False
    scatter: bool = False
    grad_gather: bool = False
    grad_scatter: bool = False

    def __str__(self) -> str:
        return ", ".join(name.replace("_", " ") for name in self._fields if getattr(self, name))


NO_OVERLAP = Overlap()


class OverlapArguments(NamedTuple):
    """The `ub_*` arguments of a module.

    Attributes:
        gathers: `ub_overlap_ag`, in both directions.
        scatters: `ub_overlap_rs`.
        scatters_grads: `ub_overlap_rs_dgrad`.
        name: `ub_name`.
    """

    gathers: bool = False
    scatters: bool = False
    scatters_grads: bool = False
    name: str | None = None

    def overlap(self, columns: bool, rows: bool) -> Overlap:
        """The overlap that these arguments request for column-parallel and row-parallel GEMMs."""
        return Overlap(
            self.gathers and columns,
            self.scatters and rows,
            self.gathers and rows,
            self.scatters_grads and columns,
        )

    def arguments(self, name: str) -> dict[str, Any]:
        """These arguments for a module inside the layer, with another `ub_name`."""
        return {
            "ub_overlap_ag": self.gathers,
            "ub_overlap_rs": self.scatters,
            "ub_overlap_rs_dgrad": self.scatters_grads,
            "ub_name": name,
        }
