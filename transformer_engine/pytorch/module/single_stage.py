"""`SingleStageModule`, the base of norms and activations: one stage, no GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch._torch_private import refuse_scripting
from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.chain.node import call_chain
from transformer_engine.pytorch.chain.part import Incoming, Planned, incoming
from transformer_engine.pytorch.chain.plan import CallPlan, PlanCache
from transformer_engine.pytorch.chain.stage import Stage
from transformer_engine.pytorch.module.settings import BuildsChain


class SingleStageModule(BuildsChain, nn.Module):
    """A module that runs a chain of one stage, and caches the plans of calls."""

    __prepare_scriptable__ = refuse_scripting

    def __init__(self, stage: Stage | None = None) -> None:
        super().__init__()
        self._plans = PlanCache()
        if stage is not None:  # else it is built from settings
            self.chain = Chain.of(stage)

    def plan_for(self, dtype: torch.dtype, needs: tuple[bool, ...]) -> CallPlan:
        """The plan of calls with results of this dtype; `needs` as in `CallPlan`."""
        if torch.compiler.is_compiling():
            return self.chain.prepare(CallPlan(dtype, needs))
        found = self._plans.get((dtype, needs))
        if found is None or found.chain is not self.chain:
            found = self._plans[dtype, needs] = self.chain.prepare(CallPlan(dtype, needs))
        return found

    def plan_call(self, values: Incoming) -> Planned:
        """The plan and the parameters of a call as a part of a larger chain, see `chain.flow`."""
        dtype, parameters = self.dtype_and_parameters(values.like)
        return self.plan_for(dtype, values.with_parameters(parameters)), parameters

    def dtype_and_parameters(
        self, like: torch.Tensor
    ) -> tuple[torch.dtype, Sequence[torch.Tensor | None]]:
        """The dtype of results for such an input, and the parameters of the stage."""
        return like.dtype, ()

    def run(self, x: torch.Tensor) -> Any:
        """Run the stage on a tensor."""
        plan, parameters = self.plan_call(incoming(x))
        return call_chain(plan, None, x.contiguous(), *parameters)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": PlanCache()}
