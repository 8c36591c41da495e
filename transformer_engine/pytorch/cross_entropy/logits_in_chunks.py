"""Losses of a projection and their gradients, by chunks of tokens, in high precision or in FP8.

For each chunk, a GEMM computes the logits, a kernel the losses, and another kernel the gradients of
the logits. Then the memory of the logits is freed for the next chunk. Two GEMMs compute what a
group of chunks adds to the gradients of `hidden` and `weight`. In high precision, the gradients of
the logits overwrite them, so each chunk is a group. FP8 codes take less memory than logits, so a
group has several chunks: then the weight's gradient is read and written less often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from transformer_engine.pytorch.chain.gemm import WgradTarget, dgrad, fprop, wgrad
from transformer_engine.pytorch.cross_entropy.parallel import (
    Rules,
    evenly,
    labels_of,
    log_sums,
    losses_of,
    sums_of,
)
from transformer_engine.pytorch.dtypes import E4M3, E5M2
from transformer_engine.pytorch.fp8.casts.operands import OperandRequest, Operands, some_rows
from transformer_engine.pytorch.fp8.casts.quantizers import IDENTITY, Quantizer
from transformer_engine.pytorch.fp8.recipes.current import CurrentQuantizer
from transformer_engine.pytorch.kernels.amax import amax, current_scales
from transformer_engine.pytorch.kernels.cross_entropy import (
    cross_entropy_backward_,
    cross_entropy_backward_codes_,
)

_LAYER = "linear_cross_entropy"  # in the report of products
_GROUP_BYTES = 2**29  # not smaller, because each group reads and writes the weight's gradient
_CHUNK_MULTIPLE = 128  # tokens, so that a GEMM has whole tiles
_CHUNKS_OF_GROUP = 4  # at most, in FP8


class Chunks(NamedTuple):
    """How many tokens a chunk and a group of chunks have; the last ones may have fewer."""

    tokens: int
    group: int


Codes: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None]  # row-wise, column-wise


class Problem(NamedTuple):
    """The inputs and settings of the loss.

    Attributes:
        chunks: number of tokens of a chunk, and of a group of chunks.
        fp8: GEMMs are in FP8.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    target: torch.Tensor
    rules: Rules
    chunks: Chunks
    fp8: bool


class Gradients(NamedTuple):
    """Gradients of the sum of losses: of `hidden` in its dtype, of `weight` and `bias` in fp32.

    None stands for a gradient that is not needed.
    """

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


def default_chunks(tokens: int, classes: int, dtype: torch.dtype, fp8: bool) -> Chunks:
    """Groups of equal size, in whole tiles, with as few chunks as 512 MiB allow.

    These bytes hold the logits of a chunk, and in FP8 the codes of the gradients of a group,
    row-wise and column-wise.
    """
    most = max(1, _GROUP_BYTES // classes)  # bytes of the columns of one class
    in_group, codes = (_CHUNKS_OF_GROUP, 2) if fp8 else (1, 0)
    groups = -(-tokens * (dtype.itemsize + codes * in_group) // (most * in_group)) or 1
    group = -(-tokens // groups)
    chunks = min(in_group, max(1, -(-group * dtype.itemsize // max(1, most - codes * group))))
    chunk = -(-tokens // (groups * chunks * _CHUNK_MULTIPLE)) * _CHUNK_MULTIPLE or _CHUNK_MULTIPLE
    return Chunks(chunk, chunk * chunks)


def run(
    problem: Problem, wanted: Sequence[bool], factors: torch.Tensor | None
) -> tuple[torch.Tensor, Gradients]:
    """Losses `[tokens]`, and gradients of the sum of losses; with factors, of their weighted sum.

    The gradient of `hidden` is the part that comes from this rank's classes.
    """
    tokens, size, rules = problem.hidden.shape[0], problem.weight.shape[0], problem.rules
    labels = labels_of(problem.target, size, rules)
    products, all_sums = _Products(problem, wanted, factors), []
    for group in _parts(slice(0, tokens), problem.chunks.group):
        hidden, codes = products.hidden(group), products.codes(group)
        for chunk in _parts(group, problem.chunks.tokens):
            first, end = chunk.start - group.start, chunk.stop - group.start
            logits = products.logits(hidden, slice(first, end))
            sums = sums_of(logits, labels[chunk], rules)
            all_sums.append(sums)
            if any(wanted):
                products.by_logits(chunk, logits, labels[chunk], log_sums(sums), codes, first)
                by_logits = products.operands(logits, codes)
            del logits  # frees them before the next chunk allocates its own
        if any(wanted):
            products.add_gradients(group, hidden, by_logits)
            del by_logits
        del hidden, codes
    return losses_of(torch.cat(all_sums, 1), labels, size, rules), products.gradients


def _parts(whole: slice, size: int) -> list[slice]:
    """Parts of this size, of which the last may be smaller; one part of nothing."""
    starts = range(whole.start, max(whole.stop, whole.start + 1), size)
    return [slice(start, min(start + size, whole.stop)) for start in starts]


class _Products:
    """The three GEMMs, and the gradients that groups of chunks have accumulated.

    In FP8, `hidden` and `weight` are in E4M3, each with a scale from its amax. The gradient of a
    loss with respect to logits lies between -1 and 1. So its scale is known before it is computed,
    and it is rounded once, to E5M2, whose range includes small probabilities.
    """

    def __init__(
        self, problem: Problem, wanted: Sequence[bool], factors: torch.Tensor | None
    ) -> None:
        hidden, weight = problem.hidden, problem.weight
        self.problem, self.wanted, self.factors = problem, wanted, factors
        self.quantizer: Quantizer = CurrentQuantizer(E4M3) if problem.fp8 else IDENTITY
        request = OperandRequest(self.quantizer, rowwise=True, columnwise=wanted[0])
        self.weight = self.quantizer.operands(weight, request)
        self.hidden_scales = self.gradient_scales = None
        fp32 = torch.float32
        if problem.fp8:
            self.hidden_scales = current_scales(hidden, E4M3, False, 0.0)
            largest = hidden.new_ones(1, dtype=fp32) if factors is None else amax(factors)
            self.gradient_scales = current_scales(largest, E5M2, True, 0.0)
        self.gradients = Gradients(
            torch.empty_like(hidden) if wanted[0] else None,
            hidden.new_empty(weight.shape, dtype=fp32) if wanted[1] else None,
            hidden.new_zeros(weight.shape[0], dtype=fp32) if wanted[2] else None,
        )

    def hidden(self, group: slice) -> Operands:
        """The hidden states of a group as operands of GEMMs."""
        request = OperandRequest(self.quantizer, rowwise=True, columnwise=self.wanted[1])
        return self.quantizer.cast(self.problem.hidden[group], self.hidden_scales, request)

    def codes(self, group: slice) -> Codes:
        """Memory for the gradients of the logits of a group in FP8; None in high precision."""
        if not self.problem.fp8:
            return None, None
        like, size = self.problem.hidden, self.problem.weight.shape[0]
        tokens = group.stop - group.start
        return (
            like.new_empty((tokens, size), dtype=torch.uint8) if self.wanted[0] else None,
            like.new_empty((size, tokens), dtype=torch.uint8) if self.wanted[1] else None,
        )

    def logits(self, hidden: Operands, rows: slice) -> torch.Tensor:
        """`[tokens, classes]` of some rows of a group, in the dtype of hidden states."""
        assert hidden.rowwise is not None
        dtype, bias, fast = self.problem.hidden.dtype, self.problem.bias, self.problem.fp8
        chunk = some_rows(hidden.rowwise, rows)
        return fprop(chunk, self.weight.rowwise, bias, dtype, fast, _LAYER)

    def by_logits(
        self,
        chunk: slice,
        logits: torch.Tensor,
        labels: torch.Tensor,
        sums: torch.Tensor,
        codes: Codes,
        first: int,
    ) -> None:
        """Compute the gradients of the logits of a chunk, and add those of the bias.

        In high precision they overwrite the logits. In FP8 they are written into the codes of the
        group, in which the chunk begins at token `first`; if the bias needs a gradient, the logits
        are overwritten, too.
        """
        rules, scales, by_bias = self.problem.rules, self.gradient_scales, self.gradients.bias
        factors = None if self.factors is None else self.factors[chunk]
        share = evenly(self.problem.weight.shape[0], rules)
        of_losses = logits, labels, sums, factors, rules.smoothing, share
        if scales is None:
            cross_entropy_backward_(*of_losses)
        else:
            into = *codes, first, by_bias is not None
            cross_entropy_backward_codes_(*of_losses, scales, E5M2, *into)
        if by_bias is not None:
            by_bias.add_(logits.sum(0, dtype=torch.float32))

    def operands(self, logits: torch.Tensor, codes: Codes) -> Operands:
        """The gradients of the logits of a group as operands of GEMMs."""
        if self.gradient_scales is None:
            return Operands(logits, logits)
        return CurrentQuantizer(E5M2).pack(*codes, self.gradient_scales)

    def add_gradients(self, group: slice, hidden: Operands, by_logits: Operands) -> None:
        """Add a group to the gradients of `hidden` and `weight`."""
        found = self.gradients
        if found.hidden is not None:
            into = found.hidden[group]
            sides = by_logits.rowwise, self.weight.columnwise
            dgrad(*sides, into.dtype, False, _LAYER, out=into)
        if found.weight is not None:
            target = WgradTarget(None, found.weight, accumulate=group.start > 0)
            wgrad(by_logits.columnwise, hidden.columnwise, target, False, _LAYER)
