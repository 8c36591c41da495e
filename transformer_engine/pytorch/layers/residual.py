"""residual + dropout(x + bias): the end of every block of a transformer layer."""

from __future__ import annotations

import torch

from transformer_engine.pytorch.chain.chain import ChainBuilder
from transformer_engine.pytorch.chain.part import Incoming, Part, Planned
from transformer_engine.pytorch.chain.stages.residual import DropoutAdd


class Residual(Part):
    """The stage `DropoutAdd`, planned on its own.

    Args:
        with_residual: it reads a branch and a residual, not a branch alone.
    """

    def __init__(self, with_residual: bool = True) -> None:
        names = ("branch", "residual") if with_residual else ("branch",)
        built = ChainBuilder(*names)
        super().__init__(built.chain(*built.add(DropoutAdd(), *range(len(names)))))

    def plan_call(
        self, values: Incoming, p: float = 0.0, bias: torch.Tensor | None = None
    ) -> Planned:
        """See `Part`; the values are branch and residual, `bias` is added to the branch."""
        return self.planned(values, (bias, None), p)


_RESIDUAL = Residual()


def dropout_add(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, p: float
) -> torch.Tensor:
    """`residual + dropout(x + bias)` in the dtype of the residual (of `x` without one).

    Args:
        x: `[..., cols]`.
        bias: `[cols]`.
        residual: shape of `x`.
        p: probability of dropping an element, 0 <= p < 1; 0 where not training.
    """
    if p == 0.0 and bias is None and residual is None:
        return x
    out: torch.Tensor = _RESIDUAL(x, residual, p, bias)
    return out
