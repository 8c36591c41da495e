"""Losses of a projection and their gradients, by chunks of tokens, in high precision or in FP8.

Chunks run one after the other: their logits become losses and then the gradient of those, which is
multiplied at once into the gradients of `hidden` and `weight`.
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
_CHUNK_BYTES = 2**29  # each chunk reads and writes the sum of the weight's gradient
_CHUNK_MULTIPLE = 128  # tokens: whole tiles of a product


class Problem(NamedTuple):
    """What losses are of.

    Attributes:
        chunk: tokens that have logits at a time.
        fp8: products are in FP8.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    target: torch.Tensor
    rules: Rules
    chunk: int
    fp8: bool


class Gradients(NamedTuple):
    """Of the sum of losses: by `hidden` in its dtype, by `weight` and `bias` in fp32.

    None is one that nobody wants.
    """

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


def default_chunk(tokens: int, classes: int, dtype: torch.dtype, fp8: bool) -> int:
    """Tokens of a chunk: equal parts, in whole tiles, whose logits do not exceed 512 MiB much.

    In FP8, codes of their gradients in both orientations lie beside them.
    """
    size = classes * (dtype.itemsize + 2 * fp8)
    parts = max(1, -(-tokens * size // _CHUNK_BYTES))
    return -(-tokens // (parts * _CHUNK_MULTIPLE)) * _CHUNK_MULTIPLE or _CHUNK_MULTIPLE


def run(
    problem: Problem, wanted: Sequence[bool], factors: torch.Tensor | None
) -> tuple[torch.Tensor, Gradients]:
    """Losses `[tokens]`, and gradients of their sum, or of the sum of their products with factors.

    The gradient of `hidden` is that of this rank's classes alone.
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
        del hidden, logits  # before those of the next chunk
    return losses_of(torch.cat(all_sums, 1), labels, size, rules), products.gradients


class _Products:
    """The three products of a chunk, and what they have added up to.

    In FP8, `hidden` and `weight` are in E4M3, each with the scale of its largest magnitude. The
    gradient of a loss by its logits lies between -1 and 1: its scale is known before it is, and it
    is rounded once, to E5M2, whose range holds the small probabilities.
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
        """The hidden states of a chunk, as products take them."""
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
        """What a chunk adds to the gradients; its logits are overwritten."""
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
        """Operands of the gradient by logits.

        Where the bias wants a gradient, that by logits also overwrites them in their dtype.
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
