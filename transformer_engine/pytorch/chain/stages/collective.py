"""Collectives of tensor and sequence parallelism, as stages of a chain.

    stage           forward                         backward
    Replicated      -                               all-reduce
    Gather          all-gather                      reduce-scatter
    Reduce          all-reduce, bias                -
    ReduceScatter   reduce-scatter, bias            all-gather

The first two stand before a Matmul whose columns ranks share, the others behind one whose rows they
share: that one's bias is theirs, because it is added once, to the sum. Without sequence parallelism
all ranks have all tokens; with it each has a run of them, along the first axis, outside the region.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.stages.base import Parameters, Results, Saved, Stage, Values
from transformer_engine.pytorch.export.onnx import refuse
from transformer_engine.pytorch.fp8.operands import OperandRequest, Operands
from transformer_engine.pytorch.fp8.quantizers import IDENTITY
from transformer_engine.pytorch.kernels.cast import cast
from transformer_engine.pytorch.kernels.dropout_add import (
    dropout_add_backward,
    dropout_add_forward,
)
from transformer_engine.pytorch.parallel.collectives import (
    Pending,
    all_gather,
    all_reduce,
    reduce_scatter,
)
from transformer_engine.pytorch.parallel.groups import TensorParallel


def before_columns(ranks: TensorParallel, index: int, gathered_tap: bool = False) -> list[Stage]:
    """What stands before a Matmul whose columns ranks share; nothing on one rank.

    Args:
        ranks: that share it.
        index: which of the chain's Matmuls it is.
        gathered_tap: the chain returns the gathered input, too.
    """
    if ranks.size == 1:
        return []
    return [Gather(ranks, index, gathered_tap) if ranks.sequence else Replicated(ranks)]


def behind_rows(ranks: TensorParallel) -> list[Stage]:
    """What stands behind a Matmul whose rows ranks share; nothing on one rank."""
    if ranks.size == 1:
        return []
    return [ReduceScatter(ranks) if ranks.sequence else Reduce(ranks)]


class Collective(Stage):
    """Base: a stage that ranks run together. It is a segment by itself, which is not recorded.

    Args:
        ranks: that run it.
    """

    communicates = True

    def __init__(self, ranks: TensorParallel) -> None:
        self.ranks = ranks

    def rename(self, layer: str) -> None:
        """Errors name the layer."""
        self.ranks.layer = layer

    def exported(self, inputs: Values, parameters: Parameters, plan: Any) -> Results:
        """A graph of ONNX is of one process."""
        refuse("tensor parallelism", "load the whole weights in one process", self.ranks.layer)


class Replicated(Collective):
    """Every rank reads the same tensor, whose gradient is the sum of theirs."""

    label = "replicated"
    results = ("replicated",)
    passes_requests = True

    def forward(
        self, inputs: Values, parameters: Parameters, plan: CallPlan, request: OperandRequest | None
    ) -> tuple[Results, Saved]:
        """The tensor itself."""
        self.ranks.check()
        return (inputs[0],), Saved(())

    def backward_data(
        self, grads: Values, saved: Saved, plan: CallPlan, request: OperandRequest | None
    ) -> tuple[Results, Any]:
        """The sum over the ranks."""
        return (all_reduce(grads[0], self.ranks.check()),), None


class _GatherPlan(NamedTuple):
    dtype: torch.dtype
    restores: bool  # the backward gathers again


class Gather(Collective):
    """Every rank gets the tokens of all; only its own are kept for the backward.

    Args:
        ranks: see `Collective`.
        index: which of the chain's Matmuls reads the result.
        tap: what is gathered is a second result of the chain.
    """

    label = "gather"
    restores = True

    def __init__(self, ranks: TensorParallel, index: int, tap: bool = False) -> None:
        super().__init__(ranks)
        self.index = index
        self.tap = tap
        self.results = ("gathered", "normalized") if tap else ("gathered",)

    def prepare(self, call: CallPlan, first: int) -> _GatherPlan:
        """Whether the input of the Matmul, whose parameters come next, is gathered again."""
        plain = call.quantizers[self.index].input is IDENTITY
        return _GatherPlan(call.dtype, plain and call.requires_grad and call.needs[first])

    def forward(
        self, inputs: Values, parameters: Parameters, plan: _GatherPlan, request: Any
    ) -> tuple[Results, Saved]:
        """The tokens of all ranks."""
        (x,) = inputs
        group = self.ranks.check()
        if x.dtype is not plan.dtype:
            x = cast(x, plan.dtype)  # under torch.autocast
        gathered = all_gather(x, group)
        if self.tap:
            return (gathered.wait(), gathered.result), Saved(())
        if not plan.restores:
            return (gathered,), Saved(())
        return (gathered.then(lambda y: Operands(y, None)),), Saved((x,))

    def restore(self, saved: Saved, plan: _GatherPlan) -> Pending | None:
        """Gather again."""
        if not saved.tensors:
            return None
        return all_gather(saved.tensors[0], self.ranks.group)  # type: ignore[arg-type]

    def backward_data(
        self, grads: Values, saved: Saved, plan: _GatherPlan, request: OperandRequest | None
    ) -> tuple[Results, Any]:
        """This rank's part of the sum."""
        grad = grads[0]
        if self.tap and grads[1] is not None:
            grad = grads[1] if grad is None else grad + grads[1]
        return (reduce_scatter(grad, self.ranks.check()),), None


class _ReducePlan(NamedTuple):
    dtype: torch.dtype
    needs_bias: bool


class Reduce(Collective):
    """The sum over the ranks. One parameter: bias `[features]` (or None), added to it."""

    label = "reduce"
    results = ("reduced",)
    parameter_count = 1

    def prepare(self, call: CallPlan, first: int) -> _ReducePlan:
        """Whether the bias has a gradient."""
        return _ReducePlan(call.dtype, call.needs[first])

    def forward(
        self, inputs: Values, parameters: Parameters, plan: _ReducePlan, request: Any
    ) -> tuple[Results, Saved]:
        """The sum, and the bias."""
        (bias,) = parameters
        summed = self._start(inputs[0], self.ranks.check())
        return (summed if bias is None else summed.then(_adds(bias)),), Saved(())

    def _start(self, x: torch.Tensor, group: Any) -> Pending:
        return all_reduce(x, group)

    def backward_data(
        self, grads: Values, saved: Saved, plan: _ReducePlan, request: OperandRequest | None
    ) -> tuple[Results, Any]:
        """The gradient itself."""
        return (grads[0],), grads[0]

    def backward_params(self, carry: Any, saved: Saved, plan: _ReducePlan) -> Parameters:
        """The gradient of the bias, of this rank's tokens."""
        if not plan.needs_bias:
            return (None,)
        return (dropout_add_backward(carry, None, 0.0, None, plan.dtype)[1],)


class ReduceScatter(Reduce):
    """This rank's tokens of the sum over the ranks, and the bias."""

    label = "reduce_scatter"

    def _start(self, x: torch.Tensor, group: Any) -> Pending:
        rows = x.shape[0]
        if x.dim() < 2 or rows % self.ranks.size:
            raise ValueError(
                f"[{self.ranks.op}] expected an input whose first size can be divided by tp_size="
                f"{self.ranks.size} with sequence_parallel=True, got {rows} (layer "
                f"{self.ranks.layer})"
            )
        return reduce_scatter(x, group)

    def backward_data(
        self, grads: Values, saved: Saved, plan: _ReducePlan, request: OperandRequest | None
    ) -> tuple[Results, Any]:
        """The gradients of all tokens."""
        return (all_gather(grads[0], self.ranks.check()),), grads[0]


def _adds(bias: torch.Tensor) -> Any:
    return lambda x: dropout_add_forward(x, bias.to(x.dtype), None, None, 0.0)
