"""Sums over parts: the merged result of attention, and the gradients of its inputs.

Part i has seen some of the keys. With its result `out_i` and its log-sum-exp `lse_i`, the result
for all keys is

    lse = log(sum of exp(lse_i))
    out = sum of exp(lse_i - lse) * out_i

The gradients of parts are computed with the log-sum-exp of all keys, so they are summed as they
are. The op `merge_parts` computes both kinds of sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from transformer_engine.pytorch.attention.context.parts import AttentionPart, RankCall
from transformer_engine.pytorch.attention.context.score_blocks import Range
from transformer_engine.pytorch.kernels.merge_parts import MOST_PARTS, merge_parts


class _Part(NamedTuple):
    """The values of a part for the tokens from `begin` on; gradients have no `log_sum_exp`."""

    begin: int
    values: torch.Tensor
    log_sum_exp: torch.Tensor | None


class _PartMerger:
    """Merges parts.

    Up to four are merged by one kernel, in the dtype of the parts and with one rounding. If there
    are more, an fp32 tensor holds the sum while four at a time are added to it.

    Args:
        rank_call: the call.
        like: a tensor on the device of the parts.
        shape: `[..., heads, size]`, the shape of the sum.
        weighted: parts are results of attention, each weighted by its share of the softmax.
    """

    def __init__(
        self, rank_call: RankCall, like: torch.Tensor, shape: torch.Size, weighted: bool
    ) -> None:
        self._token_axis = 1 if rank_call.packed else rank_call.dim
        self._packed = rank_call.packed
        self._like, self._shape, self._weighted = like, shape, weighted
        self._waiting: list[_Part] = []
        self._out: torch.Tensor | None = None
        self._log_sum_exp: torch.Tensor | None = None

    def add(
        self, range: Range, values: torch.Tensor, log_sum_exp: torch.Tensor | None = None
    ) -> None:
        """Add a part's values for a range of tokens; they are read later, so do not change them."""
        if len(self._waiting) == MOST_PARTS:
            self._merge(torch.float32)
        if values.stride(-1) != 1:  # gradients that einsum returns
            values = values.contiguous()
        self._waiting.append(_Part(0 if self._packed else range[0], values, log_sum_exp))

    def merged(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The sum of all parts in a dtype; if they are weighted, also the log-sum-exp."""
        alike = all([part.values.dtype is dtype for part in self._waiting])
        out = self._merge(dtype if alike else torch.float32)
        return out.to(dtype), self._log_sum_exp

    def _merge(self, dtype: torch.dtype) -> torch.Tensor:
        """Merge the waiting parts into the output, which the first call allocates in a dtype."""
        waiting, self._waiting = self._waiting, []
        out, fresh = self._out, self._out is None
        if out is None:
            out = self._out = self._like.new_empty(self._shape, dtype=dtype)
            if self._weighted:
                self._log_sum_exp = self._new_log_sum_exp(out)
        sums = [part.log_sum_exp for part in waiting if part.log_sum_exp is not None]
        if waiting:
            begins = [part.begin for part in waiting]
            values = [part.values for part in waiting]
            merge_parts(out, self._log_sum_exp, values, sums, begins, self._token_axis, fresh)
        elif fresh:
            out.zero_()
            if self._log_sum_exp is not None:
                self._log_sum_exp.fill_(torch.inf)
        return out

    def _new_log_sum_exp(self, out: torch.Tensor) -> torch.Tensor:
        """An empty log-sum-exp `[..., heads]`.

        Except for thd, the tokens of a head are contiguous in memory, as the backward of a part
        reads them.
        """
        if self._packed:
            return out.new_empty(self._shape[:-1], dtype=torch.float32)
        sizes = [self._shape[axis] for axis in (1 - self._token_axis, 2, self._token_axis)]
        found = out.new_empty(sizes, dtype=torch.float32)
        return found.transpose(1, 2) if self._token_axis == 1 else found.permute(2, 0, 1)


class OutputMerger(_PartMerger):
    """Merges the results of parts into the result of attention; `query` is `[..., heads, size]`."""

    def __init__(self, rank_call: RankCall, query: torch.Tensor) -> None:
        shape = torch.Size((*query.shape[:-1], rank_call.call.shape.value_size))
        super().__init__(rank_call, query, shape, weighted=True)
        self._dtype = rank_call.dtype(query)

    def add(
        self, range: Range, values: torch.Tensor, log_sum_exp: torch.Tensor | None = None
    ) -> None:
        """See `_PartMerger.add`; `values` may be `[..., heads, size]` or `[..., heads * size]`."""
        super().add(range, values.unflatten(-1, (-1, self._shape[-1])), log_sum_exp)

    def result(self, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The result with flat heads, and its log-sum-exp.

        Args:
            sink: scores `[heads]` of one more key, which has no value; or None.
        """
        out, merged_lse = self.merged(self._dtype if sink is None else torch.float32)
        assert merged_lse is not None
        log_sum_exp = merged_lse
        if sink is not None:
            merged_lse = merged_lse.masked_fill(merged_lse == torch.inf, -torch.inf)
            log_sum_exp = torch.logaddexp(merged_lse, sink.float())
            out = out * torch.exp(merged_lse - log_sum_exp).unsqueeze(-1)
        return out.flatten(-2).to(self._dtype), log_sum_exp


class GradSum(_PartMerger):
    """The sum of the gradients of `like` that parts compute."""

    def __init__(self, rank_call: RankCall, like: torch.Tensor) -> None:
        super().__init__(rank_call, like, like.shape, weighted=False)
        self.dtype = like.dtype

    def add_if_wanted(self, range: Range, grad: torch.Tensor | None) -> None:
        """Add the gradient of a range of tokens; nothing for None."""
        if grad is not None:
            self.add(range, grad)

    def in_fp32(self) -> torch.Tensor:
        """The sum in fp32."""
        return self.merged(torch.float32)[0]

    def result(self) -> torch.Tensor:
        """The sum in the dtype of the tensor."""
        if self._out is None and len(self._waiting) == 1:
            grad = self._waiting[0].values
            if grad.shape == self._shape:
                return grad.to(self.dtype)
        return self.merged(self.dtype)[0]


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
