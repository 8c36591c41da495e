"""residual + dropout(x + bias): the end of every block of a transformer layer."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.chain.chain import ChainBuilder
from transformer_engine.pytorch.chain.part import Incoming, Part, Planned
from transformer_engine.pytorch.chain.stages.residual import DropoutAdd
from transformer_engine.pytorch.fp8.exporting import exporting


class Residual(Part):
    """The stage `DropoutAdd` as a part; without `with_residual` it reads a branch only."""

    def __init__(self, with_residual: bool = True) -> None:
        names = ("branch", "residual") if with_residual else ("branch",)
        built = ChainBuilder(*names)
        super().__init__(built.chain(*built.add(DropoutAdd(), *range(len(names)))))

    def plan_call(
        self, values: Incoming, p: float = 0.0, bias: torch.Tensor | None = None
    ) -> Planned:
        """See `Part`; the values are branch and residual, `bias` is added to the branch."""
        return self.planned(values, (bias, None), p)

    def __call__(self, *values_and_arguments: Any) -> Any:
        """Run the stage; in compiled code a plain sum is torch's, which compilers fuse."""
        if self.chain.inputs == 2 and torch.compiler.is_compiling() and not exporting():
            defaults: list[Any] = [0.0, None]
            values = [*values_and_arguments, *defaults[len(values_and_arguments) - 2 :]]
            branch, residual, p, bias = values
            if residual is not None and bias is None and p == 0.0:
                return residual + branch.to(residual.dtype)
        return super().__call__(*values_and_arguments)
