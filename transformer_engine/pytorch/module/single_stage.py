"""Modules of one stage and no GEMM: what norms and activations share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.chain.node import call_chain
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.stages.base import Stage


class SingleStageModule(nn.Module):
    """A chain of one stage, with its plans."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.chain = Chain.of(stage)
        self._plans: dict[Any, CallPlan] = {}

    def plan_for(self, dtype: torch.dtype, needs: tuple[bool, ...]) -> CallPlan:
        """The plan of calls with results of this dtype; `needs` as in `CallPlan`."""
        if torch.compiler.is_compiling():
            return self.chain.prepare(CallPlan(dtype, needs))
        found = self._plans.get((dtype, needs))
        if found is None:
            found = self._plans[dtype, needs] = self.chain.prepare(CallPlan(dtype, needs))
        return found

    def run(self, dtype: torch.dtype, x: torch.Tensor, *parameters: torch.Tensor | None) -> Any:
        """Run the stage on a tensor; the result has this dtype."""
        inputs = (x.contiguous(), *parameters)
        needs = (False,) * len(inputs)
        if torch.is_grad_enabled():
            needs = tuple([t is not None and t.requires_grad for t in inputs])
        return call_chain(self.plan_for(dtype, needs), False, *inputs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}}
