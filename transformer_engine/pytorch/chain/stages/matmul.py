"""Matmul: `y = x . w^T + b`, the stage that owns the GEMMs and asks for quantised operands."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from transformer_engine.pytorch._torch_private import top_hooks
from transformer_engine.pytorch.chain import gemm
from transformer_engine.pytorch.chain.delayed import Delayed
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.stages.base import Parameters, Results, Saved, Stage, Values
from transformer_engine.pytorch.chain.stages.matmul_plan import MatmulPlan
from transformer_engine.pytorch.chain.stages.row_parts import product_by_rows, product_of_parts
from transformer_engine.pytorch.chain.stages.sides import (
    columnwise_of,
    detached,
    flatten,
    own_matrix,
    restore,
    shape_of,
    tensors_of,
)
from transformer_engine.pytorch.export.onnx import cast_there_and_back, dequantized_weight
from transformer_engine.pytorch.fp8.operands import Fp8Matrix, OperandRequest, Operands, Side
from transformer_engine.pytorch.fp8.padding import pad_operands, pad_side
from transformer_engine.pytorch.fp8.quantizers import IDENTITY
from transformer_engine.pytorch.kernels.cast import cast
from transformer_engine.pytorch.kernels.dropout_add import dropout_add_backward
from transformer_engine.pytorch.kernels.gemm import bias_for
from transformer_engine.pytorch.kernels.shapes import rows_of
from transformer_engine.pytorch.parallel.collectives import Pending, waited

# FP8 GEMMs multiply along tokens in wgrad, so the token count is padded to this with zero rows.
TOKEN_ALIGNMENT = 16

# A GEMM that also sums the columns of its operand takes 1.12x its time at 16384 x 16384 x 4096 on
# an H200 (bench_gemm): from this many elements on, a kernel of its own is cheaper.
_SEPARATE_SUM = 1 << 25


class _Facts(NamedTuple):
    """What backward must know beside the tensors."""

    x_format: int
    weight_format: int
    weight_dtype: torch.dtype
    padding: int
    saves_fp8_weight: bool  # the parameter itself, row-wise
    input_restored: bool  # by its producer, see `Stage.restore`


_NOTHING = Saved(())


class Matmul(Stage):
    """Two parameters: weight `[out, in]` and bias `[out]` (or None); one without `biased`.

    Args:
        index: which of the chain's Matmuls this is (the quantizers of a plan are in that order).
        layer: name of the module, for errors and reports.
        fuse_wgrad: accumulate the weight gradient into `weight.main_grad`.
        part: which part of the module this is; the stage's name is `<layer>[.<part>]`.
        biased: it adds the bias; else the next stage does.
        delays: the backward leaves its parameters' gradients in `delayed`.
        by_rows: the next stage asks for the rows of each rank.
    """

    label = "matmul"
    takes_pending = True
    not_settings = ("name", "part", "results", "cached_weight", "_cached_tensors", "delayed")

    def __init__(
        self,
        index: int,
        layer: str,
        fuse_wgrad: bool = False,
        part: str = "",
        biased: bool = True,
        delays: bool = False,
        by_rows: bool = False,
    ) -> None:
        self.index = index
        self.by_rows = by_rows
        self.parameter_count = 2 if biased else 1
        self.part = part
        self.results = (part or "product",)
        self.fuse_wgrad = fuse_wgrad
        self.delayed: Delayed | None = Delayed() if delays else None
        self.save_original_input = False  # save it for backward unquantised
        self.cached_weight: tuple[Hashable, Operands] | None = None
        self._cached_tensors: tuple[torch.Tensor | None, ...] = ()
        self.rename(layer)

    def rename(self, layer: str) -> None:
        """Follow the name of the module."""
        self.name = f"{layer}.{self.part}" if self.part else layer

    def prepare(self, call: CallPlan, first: int) -> MatmulPlan:
        """Which operands are wanted, and of which quantizers."""
        plan = MatmulPlan(call, call.quantizers[self.index], first, self.parameter_count == 2)
        if self.save_original_input and plan.fp8 and plan.needs_weight and not plan.wrapped:
            quantizer = plan.quantizers.input
            if not quantizer.recasts_alike:
                raise ValueError(
                    "[Linear] save_original_input with DelayedScaling: the scale of the forward is "
                    f"gone when the input is cast again; use another recipe (layer {self.name})"
                )
            plan.request = OperandRequest(quantizer, True, False)
            plan.input_in_backward = OperandRequest(quantizer, False, True)
        return plan

    def recordable(self, plan: MatmulPlan) -> bool:
        """Where no quantizer looks at tensors in torch, and no state outlives the call."""
        makes_cache = plan.fp8 and plan.first_microbatch is True and not plan.fp8_weight
        later = plan.input_in_backward is not None
        return plan.quantizers.native and not (makes_cache or later)

    def persistent_tensors(self, plan: MatmulPlan) -> Sequence[torch.Tensor]:
        """Scales and amaxes."""
        return plan.quantizers.persistent_tensors()

    def caches(self, plan: MatmulPlan) -> bool:
        """The FP8 weight, between micro-batches."""
        return plan.fp8 and plan.first_microbatch is not None and not plan.fp8_weight

    def cached(self, plan: MatmulPlan) -> tuple[torch.Tensor | None, ...] | None:
        """The FP8 weight of an earlier micro-batch."""
        return None if self._cached_operands(plan) is None else self._cached_tensors

    def request(self, plan: MatmulPlan, x: torch.Tensor) -> OperandRequest | None:
        """Row-wise for fprop, column-wise for wgrad."""
        return plan.request if _fuses(plan.request, plan, x) else None

    def grad_request(self, plan: MatmulPlan, grad: torch.Tensor) -> OperandRequest | None:
        """Row-wise for dgrad, column-wise for wgrad; with the bias gradient."""
        return plan.grad_request if _fuses(plan.grad_request, plan, grad) else None

    def forward(
        self,
        inputs: Values,
        parameters: Parameters,
        plan: MatmulPlan,
        request: OperandRequest | None,
    ) -> tuple[Results, Saved]:
        """The product."""
        (x,) = inputs
        weight, bias = (*parameters, None)[:2]
        assert weight is not None
        parts = x.parts(keep=False) if isinstance(x, Pending) else None
        operands, padding = Operands(None, None), 0
        if parts is None:
            x = waited(x)
            operands, padding = self._operands(x, plan)
        if plan.fp8_weight:
            own = own_matrix(weight)
            w = plan.quantizers.weight.from_fp8(own, plan.weight_request, plan.dtype)
        else:
            w = self._weight_operands(weight, plan)

        def multiply(rows: Side, out: torch.Tensor | None) -> torch.Tensor:
            fast = plan.fast_accumulation[0]
            return gemm.fprop(rows, w.rowwise, bias, plan.dtype, fast, self.name, out)

        y: Any
        if parts is not None:
            y = product_of_parts(parts, weight.shape[0], plan.dtype, multiply)
        elif self.by_rows and not (padding or plan.wrapped or plan.compiling):
            y = product_by_rows(operands.rowwise, weight.shape[0], plan.dtype, multiply)  # type: ignore[arg-type]
        else:
            y = multiply(operands.rowwise, None)  # type: ignore[arg-type]
            y = _without_padding(y, x, padding, plan) if padding else y
        if plan.wrapped:
            y = plan.quantizers.output.process_gemm_output(y)
        if not plan.requires_grad:
            return (y,), _NOTHING
        restored = operands.columnwise is None and not isinstance(x, torch.Tensor)
        column = operands.columnwise
        if plan.input_in_backward is not None and not restored:
            column = x
        x_data, x_scales, x_format = flatten(column if plan.needs_weight else None)
        saves_fp8_weight = plan.fp8_weight and w.columnwise is None
        column = own if saves_fp8_weight else w.columnwise
        w_data, w_scales, w_format = flatten(column if plan.needs_input else None)
        if w_data is not None and plan.fp8 and not plan.compiling and top_hooks(True) is not None:
            # For `offload`: the parameter itself stays, what was made of it is a weight.
            setattr(w_data, "never_offloaded" if saves_fp8_weight else "weight_offloading", True)
        facts = _Facts(x_format, w_format, weight.dtype, padding, saves_fp8_weight, restored)
        return (y,), Saved((x_data, x_scales, w_data, w_scales), facts)

    def _operands(self, x: Any, plan: MatmulPlan) -> tuple[Operands, int]:
        """The input as the product takes it, and with how many rows of zeros."""
        padding = -math.prod(shape_of(x)[:-1]) % TOKEN_ALIGNMENT if plan.fp8 else 0
        if isinstance(x, Operands):
            return pad_operands(x, padding), padding
        if not plan.fp8 and x.dtype is not plan.dtype:
            x = cast(x, plan.dtype)  # under torch.autocast
        return plan.quantizers.input.padded(x, padding, plan.request), padding

    def exported(self, inputs: Values, parameters: Parameters, plan: MatmulPlan) -> Results:
        """The product in the dtype of activations; FP8 operands multiply in fp32, as on the CPU."""
        (x,) = inputs
        weight, bias = (*parameters, None)[:2]
        assert weight is not None
        x = cast_there_and_back(x, plan.quantizers.input, plan.dtype, pinned=plan.is_first)
        if plan.fp8_weight:
            weight = dequantized_weight(weight, plan.fp8, plan.dtype, self.name)  # type: ignore[arg-type]
        else:
            weight = cast_there_and_back(weight, plan.quantizers.weight, plan.dtype)
        if bias is not None:
            bias = bias_for(plan.dtype, bias, plan.quantizers.input.format).to(x.dtype)
        return (linear(x, weight, bias).to(plan.dtype),)

    def detach_cache(self) -> None:
        """Free what the first micro-batch saved: a cached weight would keep its graph alive."""
        if self.cached_weight is not None:
            key, cached = self.cached_weight
            self._cache(key, Operands(detached(cached.rowwise), detached(cached.columnwise)))

    def _cache(self, key: Hashable, operands: Operands) -> None:
        self.cached_weight = (key, operands)
        self._cached_tensors = tensors_of(operands)

    def _weight_operands(self, weight: torch.Tensor, plan: MatmulPlan) -> Operands:
        """The weight as operands: cached between micro-batches, else cast now."""
        quantizer = plan.quantizers.weight
        if not plan.fp8 and weight.dtype is not plan.dtype:
            weight = cast(weight, plan.dtype)
        if plan.first_microbatch is None or not (plan.fp8 or plan.wrapped):
            return quantizer.operands(weight, plan.weight_request)
        cached = self._cached_operands(plan)
        if (plan.first_microbatch and not plan.is_recompute) or cached is None:
            return self.renew(weight, plan)
        return cached

    def renew(self, weight: torch.Tensor, plan: MatmulPlan) -> Operands:
        """Cast the weight and keep it."""
        quantizer = plan.quantizers.weight
        cast = quantizer.refreshed(weight, plan.weight_request, self._cached_operands(plan))
        self._cache(quantizer.cache_key, cast)
        return cast

    def _cached_operands(self, plan: MatmulPlan) -> Operands | None:
        """The cached weight, where it serves this plan."""
        if self.cached_weight is None:
            return None
        key, operands = self.cached_weight
        complete = operands.columnwise is not None or not plan.needs_input
        return operands if complete and key == plan.quantizers.weight.cache_key else None

    def delays(self, plan: MatmulPlan) -> bool:
        """Where the weight is trained."""
        return self.delayed is not None and plan.needs_weight

    def accumulates(self, plan: MatmulPlan) -> bool:
        """With `fuse_wgrad`."""
        return self.fuse_wgrad and plan.needs_weight

    def wgrad_target(self, plan: MatmulPlan, parameters: Parameters) -> gemm.WgradTarget | None:
        """`main_grad` of the weight."""
        if not self.accumulates(plan):
            return None
        weight = parameters[0]
        assert weight is not None
        target = gemm.main_grad_target(weight, plan.first_microbatch is True, self.name)
        # With a delayed product autograd has no gradient yet.
        return target if self.delayed is None else target._replace(announced=False)

    def backward_data(
        self, grads: Values, saved: Saved, plan: MatmulPlan, request: OperandRequest | None
    ) -> tuple[Results, Any]:
        """The gradient of the input."""
        (grad,) = grads
        facts = saved.facts
        parts = None
        if isinstance(grad, Pending):
            parts = grad.parts(keep=plan.needs_weight) if plan.needs_input else None
            if parts is None:
                grad = grad.wait()
        if isinstance(grad, Operands):
            operands = pad_operands(grad, facts.padding)
        elif parts is not None:
            operands = Operands(None, None)
        elif plan.grad_request is None:
            return (None,), Operands(grad, None)
        else:
            quantizer = plan.quantizers.grad_output
            operands = quantizer.padded(grad, facts.padding, plan.grad_request)
        if not plan.needs_input:
            return (None,), operands
        weight = restore(saved.tensors[2], saved.tensors[3], facts.weight_format)
        if facts.saves_fp8_weight:
            weight = columnwise_of(weight, operands.rowwise, plan.dtype)

        def multiply(rows: Any, out: torch.Tensor | None = None) -> torch.Tensor:
            fast = plan.fast_accumulation[1]
            return gemm.dgrad(rows, weight, plan.dtype, fast, self.name, out)

        if parts is not None:
            fp8 = isinstance(weight, Fp8Matrix)
            columns = weight.codes.shape[0] if fp8 else weight.shape[1]  # type: ignore[union-attr]
            dx = product_of_parts(parts, columns, plan.dtype, multiply)
            operands = grad.wait() if plan.needs_weight else operands
        else:
            dx = multiply(operands.rowwise)
        if facts.padding:
            dx = dx[: dx.shape[0] - facts.padding].view(*shape_of(grad)[:-1], dx.shape[-1])
        return (plan.quantizers.dgrad.process_gemm_output(dx) if plan.wrapped else dx,), operands

    def backward_params(self, carry: Any, saved: Saved, plan: MatmulPlan) -> Parameters:
        """The weight gradient and the bias gradient."""
        grad: Operands = carry
        bias_grad = grad.bias_grad
        missing_bias = plan.dtype if plan.needs_bias and bias_grad is None else None
        dense = grad.columnwise if plan.needs_weight else grad.rowwise
        if missing_bias and isinstance(dense, torch.Tensor) and _sums_apart(dense, plan):
            bias_grad = dropout_add_backward(dense, None, 0.0, None, missing_bias)[1]
            missing_bias = None
        if not plan.needs_weight:
            return (None, bias_grad)[: self.parameter_count]
        facts = saved.facts
        x = restore(saved.tensors[0], saved.tensors[1], facts.x_format)
        if facts.input_restored:
            x = pad_side(saved.restored, facts.padding, True)
        elif plan.input_in_backward is not None:
            later = plan.input_in_backward
            x = plan.quantizers.input.padded(x, facts.padding, later).columnwise  # type: ignore[arg-type]
        wanted: gemm.WgradTarget = saved.target or gemm.WgradTarget(facts.weight_dtype)
        target, fast = wanted, plan.fast_accumulation[2]
        quantizer = plan.quantizers.wgrad
        apart = quantizer is not IDENTITY and wanted.main_grad is not None
        if apart:  # to be seen before it is added
            assert wanted.main_grad is not None
            target = gemm.WgradTarget(wanted.main_grad.dtype)
        dw, summed = gemm.wgrad(grad.columnwise, x, target, fast, missing_bias, self.name)
        if quantizer is not IDENTITY:
            assert dw is not None
            dw = quantizer.process_gemm_output(dw)
        if apart and quantizer.replaces:
            dw = _delivered(dw, wanted)
        elif apart:  # adding within the GEMM may round otherwise: repeat it as without inspection
            dw, _ = gemm.wgrad(grad.columnwise, x, wanted, fast, None, self.name)
        return (dw, summed if bias_grad is None else bias_grad)[: self.parameter_count]


def _without_padding(y: torch.Tensor, x: Any, padding: int, plan: MatmulPlan) -> torch.Tensor:
    y = y[: y.shape[0] - padding].view(*shape_of(x)[:-1], y.shape[-1])
    # Functions in graphs save no views.
    return y.clone() if plan.compiling and plan.requires_grad else y


def _fuses(request: OperandRequest | None, plan: MatmulPlan, x: torch.Tensor) -> bool:
    """Whether a producer of `x` may serve the request where tokens must be padded, too.

    A cast that rounds twice anyway is cheaper with the padding.
    """
    if request is None or not plan.fp8 or rows_of(x) % TOKEN_ALIGNMENT == 0:
        return True
    return request.quantizer.rounds_once


def _sums_apart(grad: torch.Tensor, plan: MatmulPlan) -> bool:
    return not plan.needs_weight or grad.numel() >= _SEPARATE_SUM


def _delivered(dw: torch.Tensor | None, target: gemm.WgradTarget) -> torch.Tensor | None:
    assert dw is not None and target.main_grad is not None
    if target.accumulate:
        target.main_grad.add_(dw)
    else:
        target.main_grad.copy_(dw)
    return None
