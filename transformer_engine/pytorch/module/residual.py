"""The end of a block of a transformer layer: residual + dropout(x + bias).

Without dropout the last GEMM of the block adds the residual, see `call_adding`.
"""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.chain.chain import ChainBuilder
from transformer_engine.pytorch.chain.flow import Flow
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


RESIDUAL = Residual()


def call_adding(flow: Flow, module: Any, residual: Any, *arguments: Any, **keywords: Any) -> Any:
    """Call a module and add a residual to its result.

    The last GEMM of the module adds it, and the sum is rounded once. If somebody observes the
    module, it returns its own result, which is rounded before the residual is added.

    Args:
        flow: runs the module, or lists its stages.
        module: any module that returns one result, or, if `residual` is None, perhaps two.
        residual: None stands for the second result of the module, or, if it has only one, for its
            first argument.
        arguments: of the call.
        keywords: of the call.
    """
    if flow.adds(module, residual):
        return flow.call_adding(module, residual, *arguments, **keywords)
    out = flow.call(module, *arguments, **keywords)
    if residual is None:
        out, residual = out if isinstance(out, tuple) else (out, arguments[0])
    return flow.run(RESIDUAL, out, residual)
