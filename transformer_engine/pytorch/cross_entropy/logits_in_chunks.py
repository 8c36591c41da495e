"""Losses of a projection and their gradients, by chunks of tokens, in high precision or in FP8.

For each chunk, a GEMM computes the logits, a kernel the losses, another kernel the gradients of the
logits, and two GEMMs what the chunk adds to the gradients of `hidden` and `weight`. Then the memory
of the logits is freed for the next chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
from transformer_engine.pytorch.fp8.casts.operands import OperandRequest, Operands
from transformer_engine.pytorch.fp8.casts.quantizers import IDENTITY, Quantizer
from transformer_engine.pytorch.fp8.recipes.current import CurrentQuantizer
from transformer_engine.pytorch.kernels.amax import amax, current_scales
from transformer_engine.pytorch.kernels.cross_entropy import (
    cross_entropy_backward_,
    cross_entropy_backward_codes,
)

_LAYER = "linear_cross_entropy"  # in the report of products
_CHUNK_BYTES = 2**29  # not smaller, because each chunk reads and writes the weight's gradient
_CHUNK_MULTIPLE = 128  # tokens, so that a GEMM has whole tiles


class Problem(NamedTuple):
    """The inputs and settings of the loss.

    Attributes:
        chunk: number of tokens of a chunk.
        fp8: GEMMs are in FP8.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    target: torch.Tensor
    rules: Rules
    chunk: int
    fp8: bool


class Gradients(NamedTuple):
    """Gradients of the sum of losses: of `hidden` in its dtype, of `weight` and `bias` in fp32.

    None stands for a gradient that is not needed.
    """

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


def default_chunk(tokens: int, classes: int, dtype: torch.dtype, fp8: bool) -> int:
    """Tokens of a chunk: equal parts, in whole tiles, whose logits take about 512 MiB or less.

    In FP8 this includes the codes of the logits' gradients, row-wise and column-wise.
    """
    size = classes * (dtype.itemsize + 2 * fp8)
    parts = max(1, -(-tokens * size // _CHUNK_BYTES))
    return -(-tokens // (parts * _CHUNK_MULTIPLE)) * _CHUNK_MULTIPLE or _CHUNK_MULTIPLE


def run(
    problem: Problem, wanted: Sequence[bool], factors: torch.Tensor | None
) -> tuple[torch.Tensor, Gradients]:
    """Losses `[tokens]`, and gradients of the sum of losses; with factors, of their weighted sum.

    The gradient of `hidden` is the part that comes from this rank's classes.
    """
    tokens, size, rules = problem.hidden.shape[0], problem.weight.shape[0], problem.rules
    labels = labels_of(problem.target, size, rules)
    products, all_sums = _Products(problem, wanted, factors), []
    for begin in range(0, max(1, tokens), problem.chunk):
        chunk = slice(begin, begin + problem.chunk)
        hidden = products.hidden(chunk)
        logits = products.logits(hidden)
        sums = sums_of(logits, labels[chunk], rules)
        all_sums.append(sums)
        if any(wanted):
            products.add_gradients(chunk, hidden, logits, labels[chunk], log_sums(sums))
        del hidden, logits  # frees them before the next chunk allocates its own
    return losses_of(torch.cat(all_sums, 1), labels, size, rules), products.gradients


class _Products:
    """The three GEMMs of a chunk, and the gradients that chunks have accumulated.

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

    def hidden(self, chunk: slice) -> Operands:
        """The hidden states of a chunk as operands of GEMMs."""
        request = OperandRequest(self.quantizer, rowwise=True, columnwise=self.wanted[1])
        return self.quantizer.cast(self.problem.hidden[chunk], self.hidden_scales, request)

    def logits(self, hidden: Operands) -> torch.Tensor:
        """`[tokens, classes]`, in the dtype of hidden states."""
        dtype, bias, fast = self.problem.hidden.dtype, self.problem.bias, self.problem.fp8
        return fprop(hidden.rowwise, self.weight.rowwise, bias, dtype, fast, _LAYER)

    def add_gradients(
        self,
        chunk: slice,
        hidden: Operands,
        logits: torch.Tensor,
        labels: torch.Tensor,
        sums: torch.Tensor,
    ) -> None:
        """Add a chunk to the gradients; its logits may be overwritten."""
        by_logits = self._by_logits(chunk, logits, labels, sums)
        found = self.gradients
        if found.bias is not None:
            found.bias.add_(logits.sum(0, dtype=torch.float32))
        if found.hidden is not None:
            into = found.hidden[chunk]
            sides = by_logits.rowwise, self.weight.columnwise
            dgrad(*sides, into.dtype, False, _LAYER, out=into)
        if found.weight is not None:
            target = WgradTarget(None, found.weight, accumulate=chunk.start > 0)
            wgrad(by_logits.columnwise, hidden.columnwise, target, False, _LAYER)

    def _by_logits(
        self, chunk: slice, logits: torch.Tensor, labels: torch.Tensor, sums: torch.Tensor
    ) -> Operands:
        """The gradient of the logits as operands of GEMMs.

        If the bias needs a gradient, the logits are also overwritten by it, in their dtype.
        """
        rules, scales = self.problem.rules, self.gradient_scales
        factors = None if self.factors is None else self.factors[chunk]
        share = evenly(self.problem.weight.shape[0], rules)
        of_losses = logits, labels, sums, factors, rules.smoothing, share
        if scales is None:
            cross_entropy_backward_(*of_losses)
            return Operands(logits, logits)
        codes, transposed = cross_entropy_backward_codes(*of_losses, scales, E5M2, *self.wanted)
        return CurrentQuantizer(E5M2).pack(codes, transposed, scales)
