"""Collectives of tensor and sequence parallelism, as stages of a chain.

    stage           forward                         backward
    Replicated      -                               all-reduce
    Gather          all-gather                      reduce-scatter
    Reduce          all-reduce, bias                -
    ReduceScatter   reduce-scatter, bias            all-gather

The first two come before a column-parallel Matmul, the last two after a row-parallel one. The last
two also add the bias of that Matmul, because it must be added once, to the sum over the ranks. With
sequence parallelism each rank has a part of the tokens, along the first axis, outside the parallel
region; without it all ranks have all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.chain.parallel_report import Sent, count_sent
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.stage import Parameters, Results, Saved, Stage, Values
from transformer_engine.pytorch.chain.stages.fp8_gather import (
    gather_both_sides,
    gather_columns,
    gather_rows,
    gather_transposed,
)
from transformer_engine.pytorch.fp8.casts.operands import (
    Fp8Matrix,
    OperandRequest,
    Operands,
)
from transformer_engine.pytorch.fp8.casts.quantizers import (
    IDENTITY,
    Fp8Quantizer,
    Quantizer,
)
from transformer_engine.pytorch.fp8.casts.watched import Watched, WatchedShards, watched_shards
from transformer_engine.pytorch.fp8.casts.wrapping import WrappingQuantizer
from transformer_engine.pytorch.fp8.exporting import refuse
from transformer_engine.pytorch.kernels.cast import cast
from transformer_engine.pytorch.kernels.dropout_add import bias_gradient
from transformer_engine.pytorch.kernels.shapes import rows_of
from transformer_engine.pytorch.parallel.collectives import (
    LazyProduct,
    Pending,
    all_gather,
    all_reduce,
    is_large,
    memory_for_parts,
    plus_bias,
    reduce_scatter,
    way_of,
)
from transformer_engine.pytorch.parallel.groups import TensorParallel
from transformer_engine.pytorch.parallel.one_shot import one_shot_of, one_shot_tensors
from transformer_engine.pytorch.parallel.peer_memory import peer_tensors


def before_columns(ranks: TensorParallel, index: int, gathered_tap: bool = False) -> list[Stage]:
    """The stage before a column-parallel Matmul, number `index` of its chain; none on one rank.

    With `gathered_tap` the chain also returns the gathered input.
    """
    if ranks.size == 1:
        return []
    return [Gather(ranks, index, gathered_tap) if ranks.sequence else Replicated(ranks)]


def behind_rows(ranks: TensorParallel) -> list[Stage]:
    """The stage after a row-parallel Matmul; none on one rank."""
    if ranks.size == 1:
        return []
    return [ReduceScatter(ranks) if ranks.sequence else Reduce(ranks)]


class Collective(Stage):
    """Base of the collectives: a separate segment, or recorded together with other stages.

    Collectives through memory that all ranks have mapped can be recorded: one-shot collectives, and
    large ones that are transferred in parts.
    """

    communicates = True

    def __init__(self, ranks: TensorParallel) -> None:
        self.ranks = ranks

    def rename(self, layer: str) -> None:
        """Take the new name of the layer, for errors."""
        self.ranks.layer = layer

    def joins(self, first: torch.Tensor) -> bool:
        """Whether all ranks share a host, and the tensor is small or is transferred in parts."""
        group, whole = self.ranks.check(), not self.ranks.sequence
        # This also allocates memory for tensors of this size, before the call is recorded.
        passes = self.in_parts and memory_for_parts(first, group, whole) is not None
        small = not is_large(first, self.ranks.size, whole)
        return one_shot_of(group, first.device) is not None and (passes or small)

    def recordable(self, plan: Any) -> bool:
        """Always True: `joins` decides whether it is recorded."""
        return True

    def persistent_tensors(self, plan: Any) -> Sequence[torch.Tensor]:
        """The memory that all ranks have mapped."""
        group = self.ranks.group
        return (*one_shot_tensors(group), *peer_tensors(group))

    def _count(
        self,
        collective: str,
        x: torch.Tensor,
        backward: bool = False,
        overlapped: bool = False,
        in_parts: bool = False,
    ) -> None:
        if overlapped or in_parts:
            whole = collective != "all-gather"
            overlapped = way_of(x, self.ranks.group, whole, in_parts).beside
        kind = "fp8" if x.dtype is torch.uint8 else str(x.dtype).removeprefix("torch.")
        direction = "backward" if backward else "forward"
        count_sent(Sent(self.ranks.layer, collective, direction, kind, overlapped), x)

    def exported(self, inputs: Values, parameters: Parameters, plan: Any) -> Results:
        """Raise NotImplementedError: an ONNX graph runs in one process."""
        refuse("tensor parallelism", "load the whole weights in one process", self.ranks.layer)


class Replicated(Collective):
    """Every rank reads the same tensor; its gradient is the sum over the ranks."""

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
        self._count("all-reduce", grads[0], backward=True, overlapped=True)
        return (all_reduce(grads[0], self.ranks.group),), None


class _GatherPlan(NamedTuple):
    dtype: torch.dtype
    saves: bool  # saves this rank's tokens, to gather them again in the backward
    quantizer: Quantizer | None  # casts shards, if FP8 may be sent
    plain: bool  # the Matmul takes what is gathered as it is


class Gather(Collective):
    """Every rank gets the tokens of all ranks, and saves its own for the backward.

    FP8 codes are sent if the Matmul takes FP8 and casts of shards equal those of the whole tensor.

    Args:
        ranks: see `Collective`.
        index: number of the Matmul in its chain that reads the result.
        tap: the chain also returns the gathered tensor, in high precision.
    """

    label = "gather"
    regathers = True

    def __init__(self, ranks: TensorParallel, index: int, tap: bool = False) -> None:
        super().__init__(ranks)
        self.index = index
        self.tap = tap
        self.token_ratio = ranks.size
        self.results = ("gathered", "normalized") if tap else ("gathered",)

    @property
    def in_parts(self) -> bool:  # type: ignore[override]
        """Whether `ub_overlap_ag` asks for it."""
        return self.ranks.overlap.gather

    def prepare(self, call: CallPlan, first: int) -> _GatherPlan:
        """Choose what is sent, and whether to save it; parameter `first` is the Matmul's weight."""
        quantizer = call.quantizers[self.index].input
        saves = call.requires_grad and call.needs[first]
        if self.tap:
            return _GatherPlan(call.dtype, False, None, False)
        if quantizer is IDENTITY:
            return _GatherPlan(call.dtype, saves, None, True)
        if isinstance(quantizer, WrappingQuantizer):
            watched = watched_shards(quantizer, self.ranks.group)
            return _GatherPlan(call.dtype, False, watched, False)
        if call.quantizers[self.index].backward_override:  # the Matmul keeps what it needs
            return _GatherPlan(call.dtype, False, None, False)
        of_shards = quantizer.of_shards(self.ranks.group)
        return _GatherPlan(call.dtype, saves and of_shards is not None, of_shards, False)

    def request(self, plan: _GatherPlan, x: torch.Tensor) -> OperandRequest | None:
        """The cast of this rank's tokens; None if `forward` casts, with an amax of all ranks."""
        request = self._cast_of(plan, x)
        return None if request is None or not request.quantizer.native else request

    def _cast_of(self, plan: _GatherPlan, x: torch.Tensor) -> OperandRequest | None:
        """Row-wise FP8; also column-wise, if the backward needs it and blocks have no transpose."""
        quantizer = plan.quantizer
        if quantizer is None or rows_of(x) % quantizer.shard_rows:
            return None
        columns = isinstance(quantizer, Fp8Quantizer) and not quantizer.layout.transposes
        return OperandRequest(quantizer, True, columns and plan.saves)

    def forward(
        self, inputs: Values, parameters: Parameters, plan: _GatherPlan, request: Any
    ) -> tuple[Results, Saved]:
        """The tokens of all ranks."""
        (x,) = inputs
        group = self.ranks.check()
        if isinstance(x, torch.Tensor) and not isinstance(plan.quantizer, WatchedShards):
            own = self._cast_of(plan, x)
            if own is not None:
                x = own.quantizer.operands(x, own)
        if isinstance(x, Operands):
            row: Any = x.rowwise
            if isinstance(x.columnwise, torch.Tensor):
                return (self._gather_watched(x.columnwise, row, group),), Saved(())
            self._count("all-gather", row.codes, in_parts=self.ranks.overlap.gather)
            side: Any = x.columnwise or row
            saved = Saved((side.codes, side.scales), side.format) if plan.saves else Saved(())
            rows = gather_rows(row, group, self.ranks.overlap.gather)
            return (rows.then(_row_wise, _row_wise),), saved
        if x.dtype is not plan.dtype:
            x = cast(x, plan.dtype)  # under torch.autocast
        in_parts = self.ranks.overlap.gather and plan.plain  # else Matmul casts the whole result
        self._count("all-gather", x, in_parts=in_parts)
        gathered = all_gather(x, group, in_parts)
        if self.tap:
            return (gathered.wait(), gathered.result), Saved(())
        if not plan.plain:
            return (gathered,), Saved(())
        return (gathered.then(_row_wise, _row_wise),), Saved((x,), -1) if plan.saves else Saved(())

    def _gather_watched(self, plain: torch.Tensor, row: Fp8Matrix, group: Any) -> Pending:
        """Gather what `WatchedShards` has made."""
        self._count("all-gather", row.codes)
        self._count("all-gather", plain)
        rows, whole = gather_rows(row, group), all_gather(plain, group)
        return rows.then(lambda codes: Watched(whole.wait(), codes))

    def regather(self, saved: Saved, plan: _GatherPlan) -> Pending | None:
        """Gather the column-wise side, which wgrad takes, in the backward."""
        if not saved.tensors:
            return None
        tensors: Any = saved.tensors
        group, in_parts = self.ranks.group, self.ranks.overlap.gather
        self._count("all-gather", tensors[0], True, True, in_parts)
        if saved.facts < 0:
            return all_gather(tensors[0], group, in_parts)
        matrix = Fp8Matrix(tensors[0], tensors[1], saved.facts)
        if matrix.layout.transposes:
            return gather_transposed(matrix, group, in_parts)
        return gather_columns(matrix, group, in_parts)

    def backward_data(
        self, grads: Values, saved: Saved, plan: _GatherPlan, request: OperandRequest | None
    ) -> tuple[Results, Any]:
        """This rank's tokens of the gradient, summed over the ranks."""
        grad = grads[0]
        if self.tap and grads[1] is not None:
            grad = grads[1] if grad is None else grad + grads[1]
        overlap = self.ranks.overlap
        in_parts = overlap.gather or overlap.grad_scatter
        self._count("reduce-scatter", grad, True, True, in_parts)
        return (reduce_scatter(grad, self.ranks.group, in_parts=in_parts),), None


class _ReducePlan(NamedTuple):
    dtype: torch.dtype
    needs_bias: bool


class Reduce(Collective):
    """The sum over the ranks, plus the bias. One parameter: bias `[features]` or None."""

    label = "reduce"
    results = ("reduced",)
    parameter_count = 1

    def prepare(self, call: CallPlan, first: int) -> _ReducePlan:
        """Whether the bias has a gradient."""
        return _ReducePlan(call.dtype, call.needs[first])

    def forward(
        self, inputs: Values, parameters: Parameters, plan: _ReducePlan, request: Any
    ) -> tuple[Results, Saved]:
        """The sum over the ranks, plus the bias."""
        return (self._start(inputs[0], parameters[0], self.ranks.check()),), Saved(())

    def _start(self, x: Any, bias: torch.Tensor | None, group: Any) -> Pending:
        self._count("all-reduce", x)
        return all_reduce(x, group).then(lambda total: plus_bias(total, _like(bias, total)))

    def backward_data(
        self, grads: Values, saved: Saved, plan: _ReducePlan, request: OperandRequest | None
    ) -> tuple[Results, Any]:
        """The gradient itself."""
        return (grads[0],), Operands(grads[0], None)

    def backward_params(self, carry: Any, saved: Saved, plan: _ReducePlan) -> Parameters:
        """The gradient of the bias, from this rank's tokens."""
        grad: Operands = carry
        if not plan.needs_bias or grad.bias_grad is not None:
            return (grad.bias_grad,)
        assert isinstance(grad.rowwise, torch.Tensor)
        return (bias_gradient(grad.rowwise, plan.dtype),)


class ReduceScatter(Reduce):
    """This rank's tokens of the sum over the ranks, plus the bias."""

    label = "reduce_scatter"
    takes_pending = True

    def __init__(self, ranks: TensorParallel) -> None:
        super().__init__(ranks)
        self.token_ratio = Fraction(1, ranks.size)

    @property
    def in_parts(self) -> bool:  # type: ignore[override]
        """Whether `ub_overlap_rs` or `ub_overlap_ag` asks for it."""
        return self.ranks.overlap.scatter or self.ranks.overlap.grad_gather

    def _start(self, x: Any, bias: torch.Tensor | None, group: Any) -> Pending:
        rows = x.shape[0]
        if x.dim() < 2 or rows % self.ranks.size:
            raise ValueError(
                f"[{self.ranks.op}] expected an input whose first size can be divided by tp_size="
                f"{self.ranks.size} with sequence_parallel=True, got {rows} (layer "
                f"{self.ranks.layer})"
            )
        in_parts = self.ranks.overlap.scatter
        lazy = isinstance(x, LazyProduct)
        self._count("reduce-scatter", x, overlapped=in_parts and lazy, in_parts=in_parts and lazy)
        return reduce_scatter(x, group, _like(bias, x), in_parts)

    def backward_data(
        self, grads: Values, saved: Saved, plan: _ReducePlan, request: OperandRequest | None
    ) -> tuple[Results, Any]:
        """The gradients of all tokens, gathered in FP8 if the Matmul takes FP8."""
        grad, group, in_parts = grads[0], self.ranks.group, self.ranks.overlap.grad_gather
        quantizer: Any = None if request is None else request.quantizer.of_shards(group)
        if request is None or quantizer is None or rows_of(grad) % quantizer.shard_rows:
            plain = request is not None and request.quantizer is IDENTITY
            in_parts = in_parts and plain  # else the Matmul casts the whole result
            self._count("all-gather", grad, True, in_parts=in_parts)
            gathered = all_gather(grad, group, in_parts)
            if plain:
                gathered = gathered.then(_plain_sides, _plain_sides)
            return (gathered,), Operands(grad, None)
        sends_columns = request.columnwise and not quantizer.layout.transposes
        bias_grad = plan.dtype if plan.needs_bias else None
        own: Any = quantizer.operands(
            grad, OperandRequest(quantizer, True, sends_columns, bias_grad)
        )
        carry = Operands(grad, None, own.bias_grad)
        self._count("all-gather", own.rowwise.codes, True, in_parts=in_parts)
        if request.columnwise and not sends_columns:
            return (gather_both_sides(own.rowwise, group, in_parts),), carry
        rows = gather_rows(own.rowwise, group, in_parts)
        if not sends_columns:
            return (rows.then(_row_wise, _row_wise),), carry
        columns = gather_columns(own.columnwise, group, in_parts)
        self._count("all-gather", own.columnwise.codes, backward=True)
        return (rows.then(lambda row: Operands(row, columns.wait())),), carry


def _plain_sides(x: Any) -> Operands:
    return Operands(x, x)


def _row_wise(row: Any) -> Operands:
    return Operands(row, None)


def _like(bias: torch.Tensor | None, x: Any) -> torch.Tensor | None:
    return None if bias is None else cast(bias, x.dtype)  # under torch.autocast
