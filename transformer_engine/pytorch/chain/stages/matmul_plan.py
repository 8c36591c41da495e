"""`MatmulPlan`: what a Matmul decides once for all calls of a plan."""

from __future__ import annotations

from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.fp8.casts.operands import OperandRequest
from transformer_engine.pytorch.fp8.casts.quantizers import GemmQuantizers, Quantizer


class MatmulPlan:
    """The plan of a `Matmul`: facts of the call, and the requests for its operands.

    With the recipe's `backward_override` the requests ask for no column-wise sides, unless a
    feature of the debugger may replace them: the backward reads what `sides.saved_side` returns.
    """

    __slots__ = (
        "caches",
        "compiling",
        "drops_cache",
        "dtype",
        "fast_accumulation",
        "first_microbatch",
        "fp8",
        "fp8_weight",
        "grad_columns",
        "grad_request",
        "grad_rows",
        "input_in_backward",
        "is_first",
        "is_recompute",
        "needs_bias",
        "needs_input",
        "needs_weight",
        "omits_input",
        "overridden",
        "pads",
        "quantizers",
        "request",
        "requires_grad",
        "saves_values",
        "weight_request",
        "wrapped",
    )

    def __init__(
        self, call: CallPlan, quantizers: GemmQuantizers, first: int, biased: bool
    ) -> None:
        needs = call.needs
        self.dtype = call.dtype
        self.compiling = call.compiling
        self.requires_grad = call.requires_grad
        self.is_recompute = call.is_recompute
        self.is_first = first == call.chain.inputs
        self.first_microbatch = call.first_microbatch
        self.quantizers = quantizers
        self.fp8 = quantizers.fp8
        self.pads = quantizers.pads
        self.wrapped = quantizers.wrapped
        self.fast_accumulation = quantizers.fast_accumulation
        self.fp8_weight = first in call.fp8_weights  # the weight is kept in FP8
        # The weight is cached between micro-batches; a first one that caches none ends the step
        # before it, too.
        casts = self.fp8 or quantizers.weight.calls_features
        self.caches = call.first_microbatch is not None and casts and not self.fp8_weight
        self.drops_cache = call.first_microbatch is True and not self.caches
        self.needs_input = any(needs[:first])
        self.needs_weight, self.needs_bias = needs[first], biased and needs[first + 1]
        self.input_in_backward: OperandRequest | None = None  # with `save_original_input`
        self.omits_input = False  # the stage before computes it again in the backward
        self.overridden = quantizers.backward_override is not None
        self.saves_values = quantizers.backward_override == "high_precision"
        columns = self.needs_weight and self._takes_columns(quantizers.input)
        self.request = OperandRequest(quantizers.input, True, columns)
        columns = self.needs_input and self._takes_columns(quantizers.weight)
        self.weight_request = OperandRequest(quantizers.weight, True, columns)
        self.request.active = self.weight_request.active = call.cse_barrier
        bias_grad = call.dtype if self.needs_bias else None
        self.grad_request: OperandRequest | None = None  # None: only the bias needs one
        self.grad_rows: OperandRequest | None = None
        self.grad_columns: OperandRequest | None = None
        if self.needs_input or self.needs_weight:
            self.grad_request = OperandRequest(
                quantizers.grad_output, self.needs_input, self.needs_weight, bias_grad
            )

    def _takes_columns(self, quantizer: Quantizer) -> bool:
        return not self.overridden or quantizer.calls_features

    def cast_grad_in_two(self) -> None:
        """Request the sides of the gradient one by one, if possible."""
        quantizer = self.quantizers.grad_output
        if quantizer.is_fp8 and quantizer.casts_columns_later and not self.compiling:
            assert self.grad_request is not None
            self.grad_rows = OperandRequest(quantizer, True, False, self.grad_request.bias_grad)
            self.grad_columns = OperandRequest(quantizer, False, True)
