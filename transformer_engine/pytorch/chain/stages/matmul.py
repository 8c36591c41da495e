"""`Matmul`: `y = x . w^T + b`, the stage that requests operands and runs fprop, dgrad and wgrad."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from transformer_engine.pytorch._torch_private import top_hooks
from transformer_engine.pytorch.chain import gemm
from transformer_engine.pytorch.chain.plan import CallPlan, DelayedTasks
from transformer_engine.pytorch.chain.stage import (
    Parameters,
    Recomputes,
    ResultRequest,
    Results,
    Saved,
    Values,
)
from transformer_engine.pytorch.chain.stages.cached_weight import CachesWeight
from transformer_engine.pytorch.chain.stages.matmul_plan import MatmulPlan
from transformer_engine.pytorch.chain.stages.row_parts import product_by_rows, product_of_parts
from transformer_engine.pytorch.chain.stages.sides import (
    columnwise_of,
    flatten,
    for_wgrad,
    grad_operands,
    own_matrix,
    restore,
    saved_input,
    saved_weight,
    shape_of,
    without_padding,
)
from transformer_engine.pytorch.chain.weight_casts import CachedWeight, unpacked
from transformer_engine.pytorch.export.onnx import cast_there_and_back, dequantized_weight
from transformer_engine.pytorch.fp8.casts.operands import (
    Fp8Matrix,
    OperandRequest,
    Operands,
    PendingCast,
    Side,
)
from transformer_engine.pytorch.fp8.casts.padding import pad_operands, pad_side
from transformer_engine.pytorch.fp8.casts.quantizers import IDENTITY
from transformer_engine.pytorch.fp8.casts.watched import Watched
from transformer_engine.pytorch.kernels.cast import cast
from transformer_engine.pytorch.kernels.dropout_add import bias_gradient, dropout_add_forward
from transformer_engine.pytorch.kernels.gemm import bias_for
from transformer_engine.pytorch.kernels.shapes import rows_of
from transformer_engine.pytorch.parallel.collectives import Pending, waited

# wgrad sums over tokens, and FP8 GEMMs sum over a multiple of 16 values: zero rows pad the tokens.
TOKEN_ALIGNMENT = 16


class _Facts(NamedTuple):
    """What the backward needs beside tensors."""

    x_format: int
    weight_format: int
    weight_dtype: torch.dtype
    padding: int
    weight_rows: bool  # the saved weight is its row-wise codes, see `columnwise_of`
    input_again: bool  # the backward reads `Saved.input_again` instead of a saved input
    adds_residual: bool


_NOTHING = Saved(())


class Matmul(CachesWeight):
    """Its parameters are weight `[out, in]` and, if `biased`, bias `[out]` or None.

    It reads `x`, and in some chains a residual of the shape of the product, which it adds.

    Args:
        index: number of this Matmul in its chain, and of its quantizers in a plan.
        layer: name of the module, for errors and reports.
        fuse_wgrad: accumulate the weight gradient into `weight.main_grad`.
        part: part of the module that this is; the stage's name is `<layer>[.<part>]`.
        biased: this stage adds the bias; else the next stage does.
        delays: `backward_dw` computes the gradients of the parameters, not the backward.
        by_rows: the next stage reads the rows for each rank separately (`LazyProduct`).
    """

    label = "matmul"
    multiplies = True
    takes_pending = True
    lasting = ("cached_weight", "delayed")
    not_settings = ("name", "part", "results", *lasting)

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
        self.delayed: DelayedTasks | None = DelayedTasks() if delays else None
        self.save_original_input = False  # save the input for backward in high precision
        self.cached_weight: CachedWeight | None = None
        self.rename(layer)

    def rename(self, layer: str) -> None:
        """Take the new name of the module."""
        self.name = f"{layer}.{self.part}" if self.part else layer

    def prepare(self, call: CallPlan, first: int) -> MatmulPlan:
        """Choose operands and quantizers."""
        plan = MatmulPlan(call, call.quantizers[self.index], first, self.parameter_count == 2)
        recasts = plan.fp8 and not (plan.overridden or plan.wrapped)
        if self.save_original_input and recasts and plan.needs_weight:
            quantizer = plan.quantizers.input
            if not quantizer.recasts_alike:
                raise ValueError(
                    "[Linear] save_original_input with DelayedScaling: the scale of the forward is "
                    f"gone when the input is cast again; use another recipe (layer {self.name})"
                )
            plan.request = OperandRequest(quantizer, True, False)
            plan.input_in_backward = OperandRequest(quantizer, False, True)
        return plan

    def omit_input(self, plan: MatmulPlan, again: Recomputes, grad_outlives: bool) -> None:
        """Possible if `backward_params` can run after the backward of the stage before."""
        plain = plan.saves_values or not plan.fp8
        enough = again == "operands" or (again == "values" and plain)
        if plan.overridden and not plan.saves_values:
            return  # the backward reads the codes of the forward
        if enough and plan.needs_input and plan.needs_weight and self.delayed is None:
            plan.omits_input = plan.quantizers.input.casts_columns_later
            plan.request.columnwise &= not plan.omits_input
            if grad_outlives:
                plan.cast_grad_in_two()

    def input_request(self, saved: Saved, plan: MatmulPlan) -> ResultRequest | None:
        """The request for the side that wgrad takes."""
        if not plan.omits_input:
            return None
        rounded = not plan.quantizers.input.rounds_once
        return ResultRequest(saved.tensors[1], saved.facts.x_format, rounded)

    def recordable(self, plan: MatmulPlan) -> bool:
        """True if quantizers only call `_C`, and the call caches no weight and recasts no input."""
        makes_cache = plan.caches and plan.first_microbatch
        return plan.quantizers.native and not makes_cache and plan.input_in_backward is None

    def persistent_tensors(self, plan: MatmulPlan) -> Sequence[torch.Tensor]:
        """Scales and amaxes."""
        return plan.quantizers.persistent_tensors()

    def request(self, plan: MatmulPlan, x: torch.Tensor) -> OperandRequest | None:
        """Row-wise for fprop, column-wise for wgrad; None if wgrad reads the values."""
        if plan.saves_values and plan.needs_weight:
            return None
        return plan.request if _fuses(plan.request, plan, x) else None

    def grad_request(self, plan: MatmulPlan, grad: torch.Tensor) -> OperandRequest | None:
        """Row-wise for dgrad, column-wise for wgrad; with the bias gradient."""
        return plan.grad_request if _fuses(plan.grad_request, plan, grad) else None

    def weight_request(self, plan: MatmulPlan) -> OperandRequest | None:
        """Only if every call casts the weight to FP8."""
        every_call = plan.first_microbatch is None and not plan.fp8_weight
        return plan.weight_request if plan.fp8 and every_call and not plan.compiling else None

    def forward(
        self,
        inputs: Values,
        parameters: Parameters,
        plan: MatmulPlan,
        request: OperandRequest | None,
    ) -> tuple[Results, Saved]:
        """The product, plus the residual if there is one."""
        x, residual = (*inputs, None)[:2]
        weight, made = unpacked(parameters[0])
        bias = (*parameters, None)[1]
        parts = x.parts(keep=False) if isinstance(x, Pending) else None
        operands, padding = Operands(None, None), 0
        if parts is None:
            x = waited(x)
            operands, padding = self._operands(x, plan)
        own = own_matrix(weight) if plan.fp8_weight else None
        if own is not None:
            w = plan.quantizers.weight.from_fp8(own, plan.weight_request, plan.dtype)
        else:
            w = self.weight_operands(weight, plan) if made is None else made

        def multiply(
            rows: Side | None, out: torch.Tensor | None = None, addend: torch.Tensor | None = None
        ) -> torch.Tensor:
            fast = plan.fast_accumulation[0]
            return gemm.fprop(rows, w.rowwise, bias, plan.dtype, fast, self.name, out, addend)

        y: Any
        if parts is not None:
            y = product_of_parts(parts, weight.shape[0], plan.dtype, multiply)
        elif self.by_rows and not (padding or plan.wrapped or plan.compiling):
            y = product_by_rows(operands.rowwise, weight.shape[0], plan.dtype, multiply)  # type: ignore[arg-type]
        else:
            fits = residual is not None and not padding and residual.dtype is plan.dtype
            inside = fits and plan.quantizers.output is IDENTITY
            y = multiply(operands.rowwise, addend=residual if inside else None)
            if padding:
                y = without_padding(y, shape_of(x)[:-1], padding, plan)
                # In compiled code autograd functions cannot save views.
                y = y.clone() if plan.compiling and plan.requires_grad else y
        if plan.wrapped:
            y = plan.quantizers.output.process_gemm_output(y)
        if residual is not None and not inside:
            if fits and not plan.quantizers.output.replaces:
                y = multiply(operands.rowwise, addend=residual)  # as without inspection
            else:
                y = dropout_add_forward(y, None, residual, None, 0.0)
        if not plan.requires_grad:
            return (y,), _NOTHING
        x_data, x_scales, x_format, again = saved_input(x, operands, padding, plan)
        column, weight_rows = saved_weight(weight, own, w, plan)
        w_data, w_scales, w_format = flatten(column)
        if w_data is not None and plan.pads and not plan.compiling and top_hooks(True) is not None:
            # Tell `offload` that this is a parameter, which stays, or a copy of a weight.
            stays = w_data is weight or column is own
            setattr(w_data, "never_offloaded" if stays else "weight_offloading", True)
        adds = residual is not None
        facts = _Facts(x_format, w_format, weight.dtype, padding, weight_rows, again, adds)
        return (y,), Saved((x_data, x_scales, w_data, w_scales), facts)

    def _operands(self, x: Any, plan: MatmulPlan) -> tuple[Operands, int]:
        """The operands of the input, and how many rows of zeros pad them."""
        padding = -math.prod(shape_of(x)[:-1]) % TOKEN_ALIGNMENT if plan.pads else 0
        if isinstance(x, Watched):
            return x.operands(plan.quantizers.input, padding, plan.request), padding
        if isinstance(x, Operands):
            return pad_operands(x, padding), padding
        if not plan.fp8 and x.dtype is not plan.dtype:
            x = cast(x, plan.dtype)  # under torch.autocast
        return plan.quantizers.input.padded(x, padding, plan.request), padding

    def exported(self, inputs: Values, parameters: Parameters, plan: MatmulPlan) -> Results:
        """The product in the dtype of activations; of FP8 operands in fp32, as on the CPU."""
        x, residual = (*inputs, None)[:2]
        weight, bias = (*parameters, None)[:2]
        assert weight is not None
        x = cast_there_and_back(x, plan.quantizers.input, plan.dtype, pinned=plan.is_first)
        if plan.fp8_weight:
            weight = dequantized_weight(weight, plan.fp8, plan.dtype, self.name)  # type: ignore[arg-type]
        else:
            weight = cast_there_and_back(weight, plan.quantizers.weight, plan.dtype)
        if bias is not None:
            bias = bias_for(plan.dtype, bias, plan.quantizers.input.format).to(x.dtype)
        y = linear(x, weight, bias)
        return ((y if residual is None else y + residual).to(plan.dtype),)

    def delays(self, plan: MatmulPlan) -> bool:
        """True with the argument `delays` if the weight needs a gradient."""
        return self.delayed is not None and plan.needs_weight

    def accumulates(self, plan: MatmulPlan) -> bool:
        """True with `fuse_wgrad` if the weight needs a gradient."""
        return self.fuse_wgrad and plan.needs_weight

    def wgrad_target(self, plan: MatmulPlan, parameters: Parameters) -> gemm.WgradTarget | None:
        """`main_grad` of the weight."""
        if not self.accumulates(plan):
            return None
        weight = parameters[0]
        assert weight is not None
        operands = None if "wgrad" in plan.quantizers.fp8_gemms else plan.dtype
        target = gemm.main_grad_target(weight, plan.first_microbatch is True, self.name, operands)
        # `backward_dw` computes a delayed gradient: autograd gets none, not even a placeholder.
        return target if self.delayed is None else target._replace(has_placeholder=False)

    def backward_data(
        self, grads: Values, saved: Saved, plan: MatmulPlan, request: OperandRequest | None
    ) -> tuple[Results, Any]:
        """The gradient of the input; that of the residual is the gradient of the result."""
        (grad,) = grads
        facts = saved.facts
        of_residual = grads if facts.adds_residual else ()
        parts = columns = None
        if isinstance(grad, Pending):
            parts = grad.parts(keep=plan.needs_weight) if plan.needs_input else None
            if parts is None:
                grad = grad.wait()
        if isinstance(grad, Operands):
            operands = pad_operands(grad, facts.padding)
        elif parts is not None:
            operands = Operands(None, None)
        elif plan.grad_request is None:
            return (None, *of_residual), Operands(grad, None)
        else:
            operands, columns = grad_operands(grad, facts.padding, plan)
        if not plan.needs_input:
            return (None, *of_residual), operands
        weight = restore(saved.tensors[2], saved.tensors[3], facts.weight_format)
        column = None if facts.weight_rows else weight  # made for the first product

        def multiply(rows: Any, out: torch.Tensor | None = None) -> torch.Tensor:
            nonlocal column
            if column is None:
                column = columnwise_of(weight, rows, plan.dtype)
            fast = plan.fast_accumulation[1]
            return gemm.dgrad(rows, column, plan.dtype, fast, self.name, out)

        if parts is not None:
            data: Any = weight.codes if isinstance(weight, Fp8Matrix) else weight
            column_wise = isinstance(weight, Fp8Matrix) and not facts.weight_rows
            features = data.shape[0 if column_wise else 1]
            dx = product_of_parts(parts, features, plan.dtype, multiply)
            operands = grad.wait() if plan.needs_weight else operands
        else:
            dx = multiply(operands.rowwise)
        if facts.padding:
            dx = without_padding(dx, shape_of(grad)[:-1], facts.padding, plan)
        dx = plan.quantizers.dgrad.process_gemm_output(dx) if plan.wrapped else dx
        return (dx, *of_residual), columns or for_wgrad(operands)

    def backward_params(self, carry: Any, saved: Saved, plan: MatmulPlan) -> Parameters:
        """The weight gradient and the bias gradient."""
        grad: Operands = carry.cast() if isinstance(carry, PendingCast) else carry
        bias_grad = grad.bias_grad
        if plan.needs_bias and bias_grad is None:
            # Not in an epilogue of the GEMM: a plain GEMM and this kernel take less time.
            dense = grad.columnwise if plan.needs_weight else grad.rowwise
            assert isinstance(dense, torch.Tensor)
            bias_grad = bias_gradient(dense, plan.dtype)
        if not plan.needs_weight:
            return (None, bias_grad)[: self.parameter_count]
        facts = saved.facts
        x = restore(saved.tensors[0], saved.tensors[1], facts.x_format)
        if facts.input_again:
            x = pad_side(saved.input_again, facts.padding, True)
        elif plan.input_in_backward is not None:
            request = plan.input_in_backward
            x = plan.quantizers.input.padded(x, facts.padding, request).columnwise  # type: ignore[arg-type]
        elif plan.overridden and isinstance(x, Fp8Matrix):
            x = columnwise_of(x, grad.columnwise, plan.dtype)
        target: gemm.WgradTarget = saved.target or gemm.WgradTarget(facts.weight_dtype)
        fast, quantizer = plan.fast_accumulation[2], plan.quantizers.wgrad
        first_target = target
        if quantizer is not IDENTITY and target.main_grad is not None:
            # The debugger sees the gradient of this call before it is added to `main_grad`.
            first_target = gemm.WgradTarget(target.main_grad.dtype)
        dw = gemm.wgrad(grad.columnwise, x, first_target, fast, self.name)
        if quantizer is not IDENTITY:
            assert dw is not None
            dw = quantizer.process_gemm_output(dw)
        if first_target is not target:
            if quantizer.replaces:
                target.store(dw)
                dw = None
            else:  # a GEMM that accumulates rounds differently: repeat it as without inspection
                dw = gemm.wgrad(grad.columnwise, x, target, fast, self.name)
        return (dw, bias_grad)[: self.parameter_count]


def _fuses(request: OperandRequest | None, plan: MatmulPlan, x: torch.Tensor) -> bool:
    """Whether the producer of `x` may make the operands of a request itself.

    Not if tokens must be padded and the cast rounds twice: then a cast that pads is cheaper.
    """
    if request is None or not plan.pads or rows_of(x) % TOKEN_ALIGNMENT == 0:
        return True
    return request.quantizer.rounds_once
