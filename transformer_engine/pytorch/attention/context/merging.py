"""Sums over parts: the merged result of attention, and the gradients of its inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.attention.context.parts import AttentionPart, RankCall
from transformer_engine.pytorch.attention.context.score_blocks import Range
from transformer_engine.pytorch.kernels.merge_attention import merge_attention


class _PartResult(NamedTuple):
    """The result of a part: `[..., heads, size]` and `[..., heads]` of the queries in a range."""

    queries: Range
    out: torch.Tensor
    log_sum_exp: torch.Tensor


class OutputMerger:
    """Merges the results of parts, each weighted by its share of the softmax.

    Up to two are merged with one rounding, in the dtype that they have; more are merged in fp32.

    Args:
        rank_call: the call.
        query: `[..., heads, size]`.
    """

    def __init__(self, rank_call: RankCall, query: torch.Tensor) -> None:
        self.rank_call = rank_call
        self.size = rank_call.call.shape.value_size
        self._query = query
        self._waiting: list[_PartResult] = []
        self.out: torch.Tensor | None = None
        self.log_sum_exp: torch.Tensor | None = None

    def add(self, part: AttentionPart, out: torch.Tensor, log_sum_exp: torch.Tensor) -> None:
        """Add the result of a part. It may be written to."""
        out = out.unflatten(-1, (-1, self.size))
        self._waiting.append(_PartResult(part.block.queries, out, log_sum_exp))
        if self.out is not None or len(self._waiting) > 2:
            self._merge(torch.float32)

    def _merge(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge what is waiting into a result that begins in this dtype."""
        waiting, self._waiting = self._waiting, []
        if self.out is None or self.log_sum_exp is None:
            whole = (0, self.rank_call.queries.tokens)
            if waiting and waiting[0].queries == whole:
                first = waiting.pop(0)
                self.out, self.log_sum_exp = first.out.to(dtype), first.log_sum_exp
            else:
                lead = self._query.shape[:-1]
                self.out = self._query.new_zeros((*lead, self.size), dtype=dtype)
                self.log_sum_exp = self.out.new_full(lead, -torch.inf, dtype=torch.float32)
        for queries, out, log_sum_exp in waiting:
            merged, merged_lse = (
                self.rank_call.narrow(x, queries) for x in (self.out, self.log_sum_exp)
            )
            merge_attention(merged, merged_lse, out, log_sum_exp)
        return self.out, self.log_sum_exp

    def record_stream(self, stream: Any) -> None:
        """Tell the allocator that another stream than that of `add` reads the result."""
        for x in (self.out, self.log_sum_exp):
            if x is not None:
                x.record_stream(stream)

    def result(self, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The result with flat heads, and its log-sum-exp.

        Args:
            sink: scores `[heads]` of one more key, which has no value; or None.
        """
        out, merged_lse = self._merge(self._query.dtype if sink is None else torch.float32)
        log_sum_exp = merged_lse
        if sink is not None:
            log_sum_exp = torch.logaddexp(merged_lse, sink.float())
            out = out * torch.exp(merged_lse - log_sum_exp).unsqueeze(-1)
        return out.flatten(-2).to(self._query.dtype), log_sum_exp


class _Summand(NamedTuple):
    """A gradient of a range of tokens. `whole`: it has all tokens, and may be added to in place."""

    grad: torch.Tensor
    rank_call: RankCall
    range: Range
    whole: bool

    def add_to(self, total: torch.Tensor) -> None:
        """Add it to a gradient of all tokens."""
        self.rank_call.narrow(total, self.range).add_(self.grad)

    def placed(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A new gradient of all tokens, zero elsewhere."""
        if self.whole:
            return self.grad.to(dtype, copy=True)
        call, (begin, end) = self.rank_call, self.range
        total = like.new_empty(like.shape, dtype=dtype)
        call.narrow(total, self.range).copy_(self.grad)
        for rest in ((0, begin), (end, like.shape[call.dim])):
            if rest[0] < rest[1]:
                call.narrow(total, rest).zero_()
        return total


class GradSum:
    """The sum of the gradients of parts. Up to two are added in their dtype, more in fp32.

    Args:
        like: the tensor whose gradient this is.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self.like = like
        self._total: torch.Tensor | None = None  # fp32
        self._summands: list[_Summand] = []  # that are not in the total

    def add(self, rank_call: RankCall, range: Range, grad: torch.Tensor | None) -> None:
        """Add the gradient of a range of tokens. It may be written to."""
        if grad is not None:
            whole = grad.shape == self.like.shape
            self._summands.append(_Summand(grad, rank_call, range, whole))
            if self._total is not None or len(self._summands) > 2:
                self.in_fp32()

    def in_fp32(self) -> torch.Tensor:
        """The sum in fp32."""
        for summand in self._summands:
            if self._total is None:
                self._total = summand.placed(self.like, torch.float32)
            else:
                summand.add_to(self._total)
        self._summands = []
        if self._total is None:
            self._total = self.like.new_zeros(self.like.shape, dtype=torch.float32)
        return self._total

    def result(self) -> torch.Tensor:
        """The sum in the dtype of `like`."""
        dtype, summands = self.like.dtype, self._summands
        alike = all([summand.grad.dtype is dtype for summand in summands])
        if self._total is not None or len(summands) > 2 or not alike:
            return self.in_fp32().to(dtype)
        if not summands:
            return self.like.new_zeros(self.like.shape)
        first = next((summand for summand in summands if summand.whole), summands[0])
        total = first.grad if first.whole else first.placed(self.like, dtype)
        for summand in summands:
            if summand is not first:
                summand.add_to(total)
        return total


def add_bias_gradient(total: torch.Tensor, grad: torch.Tensor | None, part: AttentionPart) -> None:
    """Add the gradient of a part's block of the bias to the gradient of the whole bias."""
    if grad is None:
        return
    queries = part.block.queries
    if total.shape[-2] > 1:
        total = total.narrow(-2, queries[0], queries[1] - queries[0])
    if total.shape[-1] == 1:
        total.add_(grad)
        return
    place = 0
    for first, count in part.key_runs:
        total.narrow(-1, first, count).add_(grad.narrow(-1, place, count))
        place += count


def sink_gradient(
    sink: torch.Tensor, log_sum_exp: torch.Tensor, grad: torch.Tensor, out: torch.Tensor, size: int
) -> torch.Tensor:
    """The gradient of the sink's scores, from the tokens of this rank."""
    mean = (grad.float() * out.float()).unflatten(-1, (-1, size)).sum(-1)
    weight = torch.exp(sink.float() - log_sum_exp)
    return -(weight * mean).flatten(0, -2).sum(0).to(sink.dtype)
