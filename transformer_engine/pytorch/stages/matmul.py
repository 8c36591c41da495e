"""Matmul: `y = x . w^T + b`, the stage that owns the GEMMs and asks for quantised operands."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch import gemm
from transformer_engine.pytorch.operands import Demand, Fp8Matrix, Operands, Side
from transformer_engine.pytorch.quantizers import GemmQuantizers, Scaling
from transformer_engine.pytorch.stages.base import Parameters, Run, Saved, Stage, Value

# FP8 GEMMs multiply along tokens in wgrad, so the token count is padded to this with zero rows.
TOKEN_ALIGNMENT = 16


class _Facts(NamedTuple):
    """What backward must know beside the tensors."""

    x_format: int
    weight_format: int
    target: gemm.WgradTarget
    rows: int
    padding: int


def _flatten(side: Side | None) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    if isinstance(side, Fp8Matrix):
        return side.codes, side.scales, side.format
    return side, None, -1


def _restore(data: torch.Tensor | None, scales: torch.Tensor | None, format: int) -> Side | None:
    if data is None or scales is None:
        return data
    return Fp8Matrix(data, scales, format)


class Matmul(Stage):
    """Two parameters: weight `[out, in]` and bias `[out]` (or None).

    Args:
        index: which of the chain's Matmuls this is (the quantizers of a run are in that order).
        name: layer name, for errors and reports.
        fuse_wgrad: accumulate the weight gradient into `weight.main_grad`.
    """

    parameter_count = 2

    def __init__(self, index: int, name: str, fuse_wgrad: bool = False) -> None:
        self.index = index
        self.name = name
        self.fuse_wgrad = fuse_wgrad
        self.cached_weight: tuple[Scaling, Operands] | None = None

    def _padding(self, tokens: int, fp8: bool) -> int:
        return -tokens % TOKEN_ALIGNMENT if fp8 else 0

    def demand(self, run: Run, x: torch.Tensor) -> Demand | None:
        """Row-wise for fprop, column-wise for wgrad."""
        quantizers = run.quantizers[self.index]
        if self._padding(_rows(x), quantizers.fp8):
            return None
        return Demand(quantizers.input, True, run.needs[self.slot])

    def grad_demand(self, run: Run, grad: torch.Tensor) -> Demand | None:
        """Row-wise for dgrad, column-wise for wgrad; with the bias gradient."""
        quantizers = run.quantizers[self.index]
        if self._padding(_rows(grad), quantizers.fp8):
            return None
        demand = self._grad_demand(run)
        return demand if demand.rowwise or demand.columnwise else None

    def _grad_demand(self, run: Run) -> Demand:
        bias = run.dtype if run.needs[self.slot + 1] else None
        quantizer = run.quantizers[self.index].grad_output
        return Demand(quantizer, any(run.needs[: self.slot]), run.needs[self.slot], bias)

    def forward(
        self, x: Value, parameters: Parameters, run: Run, wants: Demand | None
    ) -> tuple[Value, Saved]:
        """The product."""
        weight, bias = parameters
        assert weight is not None
        quantizers = run.quantizers[self.index]
        rows = padding = 0
        lead: tuple[int, ...] = ()
        if not isinstance(x, Operands):
            lead, rows = x.shape[:-1], _rows(x)
            padding = self._padding(rows, quantizers.fp8)
            x = _pad(x, padding)
            x = quantizers.input.operands(x, Demand(quantizers.input, True, run.needs[self.slot]))
        w = self._weight_operands(weight, quantizers, run)
        assert x.rowwise is not None and w.rowwise is not None
        y = gemm.fprop(
            x.rowwise, w.rowwise, bias, run.dtype, quantizers.fast_accumulation[0], self.name
        )
        if padding:
            y = y[:rows].view(*lead, y.shape[-1])
        if not run.recording:
            return y, Saved(())
        x_data, x_scales, x_format = _flatten(x.columnwise if run.needs[self.slot] else None)
        w_data, w_scales, w_format = _flatten(w.columnwise if any(run.needs[: self.slot]) else None)
        facts = _Facts(x_format, w_format, self._wgrad_target(weight, run), rows, padding)
        return y, Saved((x_data, x_scales, w_data, w_scales), facts)

    def _weight_operands(
        self, weight: torch.Tensor, quantizers: GemmQuantizers, run: Run
    ) -> Operands:
        """The weight as operands: cached between micro-batches, else cast now."""
        columnwise = any(run.needs[: self.slot])
        first = run.first_microbatch
        if first is False and self.cached_weight is not None:
            scaling, cached = self.cached_weight
            complete = not columnwise or cached.columnwise is not None
            if scaling is quantizers.weight.scaling and complete:
                return cached
        if not quantizers.fp8:
            weight = weight.to(run.dtype)
        demand = Demand(quantizers.weight, True, columnwise)
        operands = quantizers.weight.operands(weight, demand)
        if first is not None and quantizers.fp8:
            self.cached_weight = (quantizers.weight.scaling, operands)
        return operands

    def _wgrad_target(self, weight: torch.Tensor, run: Run) -> gemm.WgradTarget:
        if not (self.fuse_wgrad and run.needs[self.slot]):
            return gemm.WgradTarget(weight.dtype)
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None:
            raise ValueError(
                f"[wgrad] expected weight.main_grad with fuse_wgrad_accumulation=True, got none "
                f"(layer {self.name})"
            )
        overwrite = run.first_microbatch is True or getattr(weight, "overwrite_main_grad", False)
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True  # tells data-parallel hooks where the gradient is
        return gemm.WgradTarget(weight.dtype, main_grad, not overwrite)

    def backward_data(
        self, grad: Value, saved: Saved, run: Run, wants: Demand | None
    ) -> tuple[Value | None, Any]:
        """The gradient of the input."""
        quantizers, facts = run.quantizers[self.index], saved.facts
        lead: tuple[int, ...] = ()
        if not isinstance(grad, Operands):
            lead = grad.shape[:-1]
            grad = self._grad_operands(_pad(grad, facts.padding), run)
        dx = None
        if any(run.needs[: self.slot]):
            weight = _restore(saved.tensors[2], saved.tensors[3], facts.weight_format)
            assert grad.rowwise is not None and weight is not None
            dx = gemm.dgrad(
                grad.rowwise, weight, run.dtype, quantizers.fast_accumulation[1], self.name
            )
            if facts.padding:
                dx = dx[: facts.rows].view(*lead, dx.shape[-1])
        return dx, grad

    def _grad_operands(self, grad: torch.Tensor, run: Run) -> Operands:
        demand = self._grad_demand(run)
        if demand.rowwise or demand.columnwise:
            return run.quantizers[self.index].grad_output.operands(grad, demand)
        return Operands(None, None, grad.flatten(0, -2).sum(0))  # only the bias is trained

    def backward_params(self, carry: Any, saved: Saved, run: Run) -> Parameters:
        """The weight gradient and the bias gradient."""
        needs_weight, needs_bias = run.needs[self.slot], run.needs[self.slot + 1]
        grad: Operands = carry
        bias_grad = grad.bias_grad
        missing_bias = run.dtype if needs_bias and bias_grad is None else None
        dw = None
        if needs_weight:
            facts = saved.facts
            x = _restore(saved.tensors[0], saved.tensors[1], facts.x_format)
            assert grad.columnwise is not None and x is not None
            fast = run.quantizers[self.index].fast_accumulation[2]
            dw, summed = gemm.wgrad(grad.columnwise, x, facts.target, fast, missing_bias, self.name)
            bias_grad = summed if bias_grad is None else bias_grad
        elif missing_bias is not None:
            assert isinstance(grad.rowwise, torch.Tensor)
            bias_grad = grad.rowwise.flatten(0, -2).sum(0)
        return dw, bias_grad


def _rows(x: torch.Tensor) -> int:
    return x.numel() // x.shape[-1] if x.shape[-1] else 0


def _pad(x: torch.Tensor, padding: int) -> torch.Tensor:
    """Add zero tokens; they change no result, and their own are cut off again."""
    if not padding:
        return x
    return torch.nn.functional.pad(x.reshape(-1, x.shape[-1]), (0, 0, 0, padding))
