"""Modules of one stage and no GEMM: what norms and activations share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.chain.stages.base import Run, Stage


class PlannedChain(nn.Module):
    """A chain of one stage, with its plans."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.chain = Chain([stage])
        self._runs: dict[Any, Run] = {}

    def run_of(self, dtype: torch.dtype, needs: tuple[bool, ...]) -> Run:
        """The run of calls with results of this dtype; `needs` as in `Run`."""
        if torch.compiler.is_compiling():
            return self.chain.plan(Run(dtype, needs))
        found = self._runs.get((dtype, needs))
        if found is None:
            found = self._runs[dtype, needs] = self.chain.plan(Run(dtype, needs))
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runs": {}}
