"""Which collectives of a layer users ask to overlap, by its `ub_*` arguments."""

from __future__ import annotations

from typing import Any, NamedTuple


class Overlap(NamedTuple):
    """Which collectives of a layer shall run in chunks beside the GEMM before or behind them.

    Attributes:
        gather: of the input of a column-parallel GEMM.
        scatter: of the output of a row-parallel GEMM.
        grad_gather: of the gradient that a row-parallel GEMM reads.
        grad_scatter: of the gradient that a column-parallel GEMM makes; else it runs beside the
            GEMM of the weight gradient, as it does in any case.
    """

    gather: bool = False
    scatter: bool = False
    grad_gather: bool = False
    grad_scatter: bool = False

    def __str__(self) -> str:
        return ", ".join(name.replace("_", " ") for name in self._fields if getattr(self, name))


NO_OVERLAP = Overlap()


class Asked(NamedTuple):
    """What the `ub_*` arguments of a module say.

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

    def of(self, columns: bool, rows: bool) -> Overlap:
        """What they mean for GEMMs that ranks share so."""
        return Overlap(
            self.gathers and columns,
            self.scatters and rows,
            self.gathers and rows,
            self.scatters_grads and columns,
        )

    def arguments(self, name: str) -> dict[str, Any]:
        """The same for a module within, under this `ub_name`."""
        return {
            "ub_overlap_ag": self.gathers,
            "ub_overlap_rs": self.scatters,
            "ub_overlap_rs_dgrad": self.scatters_grads,
            "ub_name": name,
        }


def overlap_asked(module: Any) -> Overlap:
    """Which collectives of a module shall run in chunks: what counts of its `ub_*` arguments.

    That is nothing without several ranks and sequence parallelism.
    """
    ranks = getattr(module, "ranks", None)
    return NO_OVERLAP if ranks is None else ranks.overlap
