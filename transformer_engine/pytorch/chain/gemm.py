"""The three GEMMs of a Linear: three formulas, three functions.

Each function takes one side, row-wise or column-wise, of two `Operands`. Both sides are plain or
both are FP8; anything else is an error that names the layer and the GEMM. Every call is counted for
`gemm_report`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.chain.main_grad_uses import (
    MainGradUses,
    mark_forward,
    overwrites,
)
from transformer_engine.pytorch.fp8.casts.operands import Fp8Matrix, Side
from transformer_engine.pytorch.fp8.process_state import process_state
from transformer_engine.pytorch.kernels import gemm as kernel
from transformer_engine.pytorch.kernels.cast import cast

_KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_is_compiling = torch.compiler.is_compiling  # looked up once: attributes of torch take time
_TRACED = "of a compiled graph"  # instead of a layer's name


def _count(layer: str, gemm: str, a: Side | None, b: Side | None) -> bool:
    """Check that the operands are of one kind, count the GEMM, and say whether it is FP8.

    Traced code passes `_TRACED` as the layer and counts nothing: torch 2.11 makes a guard of each
    name that it passes on, so that layers of one shape would not share a graph.
    """
    fp8 = type(a) is Fp8Matrix
    if fp8 is not (type(b) is Fp8Matrix) or a is None:
        raise TypeError(
            f"[{gemm}] expected both operands in FP8 or both in high precision, got "
            f"{_describe(a)} and {_describe(b)} (layer {layer})"
        )
    if fp8 and a.format != b.format and not a.layout.multiplies(b.layout):  # type: ignore[union-attr, arg-type]
        raise TypeError(
            f"[{gemm}] expected scales of blocks in both operands or in neither, got "
            f"{_describe(a)} and {_describe(b)} (layer {layer})"
        )
    if not torch.compiler.is_compiling():
        key = (layer, gemm, "fp8" if fp8 else _KINDS[a.dtype])  # type: ignore[union-attr]
        process_state().gemms.add(key)
    return fp8


def _unpack(side: Side | None) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    if type(side) is Fp8Matrix:
        return side.codes, side.scales, side.format
    return side, None, kernel.PLAIN  # type: ignore[return-value]


def _describe(side: Side | None) -> str:
    if side is None:
        return "nothing"
    return str(side.layout if isinstance(side, Fp8Matrix) else side.dtype)


def fprop(
    x: Side | None,
    weight: Side | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    fast_accumulation: bool,
    layer: str,
    out: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """`y[M, N] = x[M, K] . weight[N, K]^T + addend[M, N] + bias[N]`, in `dtype`.

    Without an addend the product may be written to `out`.
    """
    name = _TRACED if torch.compiler.is_compiling() else layer
    _count(name, "fprop", x, weight)
    sides, layout = (x, weight), (False, False)
    return _product(sides, dtype, layout, fast_accumulation, out, bias=bias, addend=addend)


def dgrad(
    grad_output: Side | None,
    weight: Side | None,
    dtype: torch.dtype,
    fast_accumulation: bool,
    layer: str,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`dx[M, K] = dy[M, N] . weight[N, K]`, see `fprop`; an FP8 weight is passed transposed."""
    name = _TRACED if torch.compiler.is_compiling() else layer
    fp8 = _count(name, "dgrad", grad_output, weight)
    return _product((grad_output, weight), dtype, (False, not fp8), fast_accumulation, out)


def _product(
    sides: tuple[Side | None, Side | None],
    dtype: torch.dtype | None,
    transposed: tuple[bool, bool],
    fast_accumulation: bool,
    out: torch.Tensor | None,
    accumulate: bool = False,
    bias: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    (a, a_scales, a_format), (b, b_scales, b_format) = _unpack(sides[0]), _unpack(sides[1])
    if out is not None:
        operands = (a, b, a_scales, b_scales, a_format, b_format, *transposed)
        kernel.gemm_into(out, *operands, accumulate, fast_accumulation, bias=bias)
        return out
    of_sides = (a_scales, b_scales, a_format, b_format, *transposed)
    return kernel.gemm(a, b, dtype or a.dtype, *of_sides, fast_accumulation, bias, None, addend)


class WgradTarget(NamedTuple):
    """Where a weight gradient goes: into a new tensor, or into `main_grad`.

    Attributes:
        dtype: dtype of the new tensor; None for the dtype of the operands.
        main_grad: the existing tensor that the gradient goes into; None for a new tensor.
        accumulate: add to what is in `main_grad`. In eager mode `settled` decides it.
        has_placeholder: autograd gets a placeholder for a gradient that went into `main_grad`, so
            that hooks of data-parallel trainers run.
        zeroed: the placeholder is zero; else its values are undefined.
        weight: the weight, whose other uses may have written; None in compiled code.
        every_backward: each backward of a graph overwrites once.
        uses: the mark of a forward that lets the next backward overwrite.
    """

    dtype: torch.dtype | None
    main_grad: torch.Tensor | None = None
    accumulate: bool = False
    has_placeholder: bool = False
    zeroed: bool = False
    weight: torch.Tensor | None = None
    every_backward: bool = False
    uses: MainGradUses | None = None

    def settled(self) -> WgradTarget:
        """The target of the backward that comes now: it overwrites, or adds to other uses."""
        if self.weight is None:
            return self
        accumulate = not overwrites(self.weight, self.every_backward)
        return self if accumulate is self.accumulate else self._replace(accumulate=accumulate)

    @property
    def mode(self) -> tuple[Any, ...]:
        """The settings of a GEMM into `main_grad`; recordings with equal ones can be shared."""
        assert self.main_grad is not None
        return self.accumulate, self.main_grad.dtype

    def placeholder(self) -> torch.Tensor | None:
        """What autograd gets for a gradient that went into `main_grad`; None for no gradient."""
        if self.main_grad is None or not self.has_placeholder:
            return None
        make = torch.zeros_like if self.zeroed else torch.empty_like
        return make(self.main_grad, dtype=self.dtype)

    def store(self, dw: torch.Tensor | None) -> None:
        """Put a gradient into `main_grad`."""
        assert dw is not None and self.main_grad is not None
        if self.accumulate:
            self.main_grad.add_(dw)
        else:
            self.main_grad.copy_(dw)


def main_grad_target(
    weight: torch.Tensor, overwrite: bool, layer: str, operands: torch.dtype | None = None
) -> WgradTarget:
    """The weight's `main_grad`, where data-parallel trainers keep gradients.

    Args:
        weight: its attributes `overwrite_main_grad` and `zero_out_wgrad` are read, and
            `grad_added_to_main_grad` is set to True if there is one.
        overwrite: this call begins a new sum in `main_grad`, see `main_grad_uses`.
        layer: for messages.
        operands: dtype of the operands of a GEMM in high precision, which itself adds to
            `main_grad`; None for FP8 operands.

    Raises:
        ValueError: the weight has no `main_grad`, or one of another shape.
        TypeError: no GEMM can add its product to a `main_grad` of this dtype.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ValueError(
            "[wgrad] expected weight.main_grad with fuse_wgrad_accumulation=True, got none "
            f"(layer {layer})"
        )
    if main_grad.shape != weight.shape:
        raise ValueError(
            f"[wgrad] expected weight.main_grad of shape {tuple(weight.shape)}, got "
            f"{tuple(main_grad.shape)} (layer {layer})"
        )
    if operands is not None and main_grad.dtype not in (operands, torch.float32):
        raise TypeError(
            "[wgrad] expected weight.main_grad of torch.float32 or of the dtype of activations, "
            f"{operands}, got {main_grad.dtype} (layer {layer})"
        )
    every_backward = getattr(weight, "overwrite_main_grad", False)
    overwrite = overwrite or every_backward
    has_placeholder = hasattr(weight, "grad_added_to_main_grad")  # where data-parallel hooks look
    if has_placeholder:
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    zeroed = getattr(weight, "zero_out_wgrad", False)
    how = not overwrite, has_placeholder, zeroed
    if _is_compiling():
        return WgradTarget(weight.dtype, main_grad, *how)
    uses = mark_forward(weight, every_backward) if overwrite else None
    return WgradTarget(weight.dtype, main_grad, *how, weight, every_backward, uses)


def wgrad(
    grad_output: Side | None,
    x: Side | None,
    target: WgradTarget,
    fast_accumulation: bool,
    layer: str,
) -> torch.Tensor | None:
    """`dw[N, K] = dy[M, N]^T . x[M, K]`; FP8 sides are the transposes `[N, M]` and `[K, M]`.

    Returns None if the gradient went into `main_grad`.
    """
    name = _TRACED if torch.compiler.is_compiling() else layer
    fp8 = _count(name, "wgrad", grad_output, x)
    sides, transposed = (grad_output, x), (not fp8, not fp8)
    out, accumulate = target.main_grad, target.accumulate
    dtype = target.dtype
    if out is None and not (fp8 or dtype is None or dtype is x.dtype):  # type: ignore[union-attr]
        dtype = torch.float32  # a plain product has the dtype of its operands, or fp32
    made = _product(sides, dtype, transposed, fast_accumulation, out, accumulate)
    return cast(made, target.dtype or made.dtype) if out is None else None


@dataclass(frozen=True)
class GemmReport:
    """GEMMs run so far, by `(layer, gemm, kind)`; kind is fp8, bf16, fp16 or fp32."""

    counts: dict[tuple[str, str, str], int]

    def total(self, kind: str | None = None) -> int:
        """How many GEMMs ran, of one kind or in all."""
        return sum(n for (_, _, k), n in self.counts.items() if kind in (None, k))

    def __str__(self) -> str:
        kinds = sorted({kind for _, _, kind in self.counts})
        lines = ["GEMMs: " + (", ".join(f"{self.total(k)} {k}" for k in kinds) or "none")]
        layers = sorted({(layer, gemm) for layer, gemm, _ in self.counts}, key=_natural)
        width = max((len(layer) for layer, _ in layers), default=0)
        for layer, gemm in layers:
            cells = [
                f"{self.counts[layer, gemm, k]:>8} {k}"
                for k in kinds
                if (layer, gemm, k) in self.counts
            ]
            lines.append(f"  {layer:<{width}}  {gemm:<5} {' '.join(cells)}")
        return "\n".join(lines)


def _natural(names: tuple[str, str]) -> list[Any]:
    """Sorts `layer_10` after `layer_2`."""
    return [
        [
            (part.isdigit(), int(part) if part.isdigit() else part)
            for part in re.split(r"(\d+)", name)
        ]
        for name in names
    ]


def gemm_report(reset: bool = False) -> GemmReport:
    """Count of the GEMMs run by modules since the start (or the last reset), in eager mode.

    Args:
        reset: start counting anew.

    >>> gemm_report().total("fp8") >= 0
    True
    """
    return GemmReport(process_state().gemms.totals(reset))
