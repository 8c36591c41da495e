"""`general_gemm`: one matrix product under the argument names of the documented API."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.kernels import gemm as kernel
from transformer_engine.pytorch.scale_layout import layout_of
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor

__all__ = ["general_gemm"]

_LAYOUTS = ("TN", "NN", "NT")
# Other arguments, and the values of theirs that change nothing.
_OTHERS: dict[str, tuple[object, ...]] = {
    "alpha": (1.0,),
    "beta": (None,),
    "bulk_overlap": (False,),
    "extra_output": (None,),
    "ub": (None,),
    "ub_type": (None,),
}


def general_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool | None = False,
    gelu_in: torch.Tensor | None = None,
    *,
    accumulate: bool = False,
    layout: str = "TN",
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, None]:
    """A product of `A` and `B`, both plain or both `Float8Tensor`.

    | layout | out | A | B |
    | --- | --- | --- | --- |
    | TN | `B A^T` `[m, n]` | `[n, k]` | `[m, k]` |
    | NN | `B A` `[m, n]` | `[k, n]` | `[m, k]` |
    | NT | `B^T A` `[m, n]` | `[k, n]` | `[k, m]` |

    Args:
        A: the right factor, as the table says.
        B: the left factor.
        out_dtype: of the result; None is the (nominal) dtype of `B`.
        quantization_params: a quantizer for the result, or None.
        gelu: apply GELU (after the bias).
        gelu_in: with `grad`, multiply by GELU's derivative at this pre-activation.
        accumulate: add to `out`.
        layout: `"TN"`, `"NN"` or `"NT"`.
        out: write here; its dtype takes the place of `out_dtype`.
        bias: `[n]`, added; with `grad` only its dtype counts, see Returns.
        use_split_accumulator: FP8 sums are promoted to fp32 regularly; with block scales always.
        grad: this is a product of a backward pass.
        others: `workspace` (not needed) and other arguments at their defaults.

    Returns:
        `(out, bias_grad, gelu_input, None)`: `bias_grad` with `grad` and `bias` is the sum of `B`
        over k; `gelu_input` with `gelu` is the pre-activation.

    Raises:
        ValueError: an unknown layout, or `accumulate` without `out`.
        TypeError: one factor is FP8 and the other is not; unknown arguments.
        NotImplementedError: arguments that are not implemented, or only not together.

    >>> general_gemm(torch.ones(2, 3), torch.ones(4, 3))[0].shape
    torch.Size([4, 2])
    """
    _refuse(others)
    if layout not in _LAYOUTS:
        raise ValueError(f"[general_gemm] expected layout TN, NN or NT, got {layout!r}")
    a, b = _Factor(B, transposed=layout == "NT"), _Factor(A, transposed=layout != "TN")
    sides = {**_sides(a, b), "fast_accumulation": not use_split_accumulator}
    if a.fp8 and not layout_of(a.format).fast_accumulation:
        sides["fast_accumulation"] = False
    epilogue = bool(gelu) or gelu_in is not None or (bias is not None and not grad)
    _check_target(out, accumulate, epilogue)
    grad_dtype = bias.dtype if grad and bias is not None else None
    if grad_dtype is not None and a.fp8:
        raise NotImplementedError("[general_gemm] the bias gradient of FP8 factors")
    if out is not None and not epilogue:
        bias_grad = None
        if grad_dtype is not None:
            rows = a.data.shape[-1] if a.transposed else a.data.shape[:-1].numel()
            bias_grad = a.data.new_empty(rows, dtype=grad_dtype)
        kernel.gemm_into(out, a.data, b.data, accumulate=accumulate, bias_grad=bias_grad, **sides)
        return out, bias_grad, None, None
    activation = kernel.GELU_BACKWARD if gelu_in is not None else kernel.NO_ACTIVATION
    result, pre_activation, bias_grad = kernel.gemm(
        a.data,
        b.data,
        out.dtype if out is not None else out_dtype or B.dtype,
        bias=None if grad else bias,
        activation=kernel.GELU if gelu else activation,
        aux=gelu_in,
        bias_grad=grad_dtype,
        **sides,
    )
    if out is not None:
        result = out.copy_(result)
    elif quantization_params is not None:
        result = quantization_params(result)
    return result, bias_grad, pre_activation, None


class _Factor:
    """A factor as the kernel takes it: FP8 ones are transposed beforehand, others within."""

    def __init__(self, x: torch.Tensor, transposed: bool) -> None:
        self.fp8 = isinstance(x, QuantizedTensor)
        self.scales: torch.Tensor | None = None
        self.format = kernel.PLAIN
        self.transposed = transposed and not self.fp8
        self.data = x
        self.kind = type(x).__name__
        if isinstance(x, QuantizedTensor):
            side = x.side(columnwise=transposed)
            if side is None:
                missing = "column" if transposed else "row"
                raise ValueError(
                    f"[general_gemm] expected {missing}-wise data in a {self.kind}, got none"
                )
            self.data, self.scales, self.format = side.codes, side.scales, side.format


def _sides(a: _Factor, b: _Factor) -> dict[str, Any]:
    """What the kernel must know of both factors beside their data."""
    if a.fp8 is not b.fp8:
        raise TypeError(
            "[general_gemm] expected both factors in FP8 or both in high precision, got "
            f"{b.kind} and {a.kind}"
        )
    return {
        "a_scales": a.scales,
        "b_scales": b.scales,
        "a_format": a.format,
        "b_format": b.format,
        "a_transposed": a.transposed,
        "b_transposed": b.transposed,
    }


def _check_target(out: torch.Tensor | None, accumulate: bool, epilogue: bool) -> None:
    if accumulate and out is None:
        raise ValueError("[general_gemm] expected out with accumulate=True, got None")
    if accumulate and epilogue:
        raise NotImplementedError("[general_gemm] accumulate=True with a bias or GELU")


def _refuse(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name == "workspace":
            continue
        if name not in _OTHERS:
            raise TypeError(f"general_gemm() got an unexpected keyword argument {name}")
        if value not in _OTHERS[name]:
            raise NotImplementedError(f"[general_gemm] {name}={value!r}")


def get_workspace() -> torch.Tensor:
    """What `general_gemm` wants of its callers as workspace: no bytes, it brings its own.

    >>> get_workspace().numel()
    0
    """
    return torch.empty(0, dtype=torch.uint8)
