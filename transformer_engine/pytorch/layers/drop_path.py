"""DropPath: in training, whole samples of a residual branch are left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.chain.flow import joins_chains
from transformer_engine.pytorch.chain.part import Incoming, Part, Planned
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.stage import Parameters, Results, Saved, Stage, Values
from transformer_engine.pytorch.fp8.casts.operands import OperandRequest
from transformer_engine.pytorch.module.arguments import check_numbers


class DropSamples(Stage):
    """Multiplies each sample by 0 with probability `p`, else by `1 / (1 - p)`.

    The parameter is `cu_seqlens` of packed tokens, or None. The `options` of a call are `p` and the
    dimension of samples.
    """

    label = "drop_path"
    results = ("branch",)
    parameter_count = 1

    def describe_options(self, options: tuple[float, int]) -> None:
        """None: it draws random numbers."""

    def forward(
        self, inputs: Values, parameters: Parameters, plan: CallPlan, request: OperandRequest | None
    ) -> tuple[Results, Saved]:
        """Draw factors from torch's generator, and multiply."""
        (x,), (cu_seqlens,), (p, batch_dim) = inputs, parameters, plan.options
        samples = x.shape[batch_dim] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        factor = x.new_empty(samples).bernoulli_(1.0 - p).div_(1.0 - p if p < 1.0 else 1.0)
        if cu_seqlens is not None:
            token = torch.arange(x.shape[0], device=x.device)
            sequence = torch.searchsorted(cu_seqlens[1:].to(torch.int64), token, right=True)
            factor = factor[sequence.clamp_(max=samples - 1)]
        shape = [1] * x.dim()
        shape[batch_dim] = -1
        factor = factor.view(shape)
        return (x * factor,), Saved((factor,) if plan.requires_grad else ())

    def backward_data(
        self, grads: Values, saved: Saved, plan: CallPlan, request: OperandRequest | None
    ) -> tuple[Results, Any]:
        """Multiply the gradient by the same factors."""
        return (grads[0] * saved.tensors[0],), None

    def backward_params(self, carry: Any, saved: Saved, plan: CallPlan) -> Parameters:
        """None."""
        return (None,)


class _Part(Part):
    def plan_call(
        self, values: Incoming, cu_seqlens: torch.Tensor | None, p: float, batch_dim: int
    ) -> Planned:
        return self.planned(values, (cu_seqlens,), (p, batch_dim))


_PART = _Part(Chain.of(DropSamples()))


@joins_chains
class DropPath(nn.Module):
    """Zero a sample's branch with probability `drop_prob`; scale the others by `1/(1-drop_prob)`.

    Args:
        drop_prob: in [0, 1].
        batch_dim: the dimension of samples.
    """

    chain = _PART.chain

    def __init__(self, drop_prob: float = 0.0, batch_dim: int = 0) -> None:
        super().__init__()
        check_numbers("DropPath", None, drop_prob=drop_prob)
        if not 0.0 <= drop_prob <= 1.0:
            raise ValueError(f"[DropPath] expected 0 <= drop_prob <= 1, got {drop_prob}")
        self.drop_prob = drop_prob
        self.batch_dim = batch_dim

    def forward(
        self, hidden_state: torch.Tensor, cu_seqlens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Drop samples, or with `cu_seqlens` `[batch + 1]` sequences of packed tokens."""
        if self.drop_prob == 0.0 or not self.training:
            return hidden_state
        return _PART(hidden_state, cu_seqlens, self.drop_prob, self.batch_dim)

    def plan_call(self, values: Incoming, cu_seqlens: torch.Tensor | None = None) -> Planned | None:
        """The plan and the parameters of a call as a part of a larger chain, see `chain.flow`."""
        if self.drop_prob == 0.0 or not self.training:
            return None
        return _PART.plan_call(values, cu_seqlens, self.drop_prob, self.batch_dim)

    def extra_repr(self) -> str:
        """The probability."""
        return f"drop_prob={self.drop_prob}"
