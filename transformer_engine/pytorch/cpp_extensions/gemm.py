"""`general_gemm`: one matrix product under the argument names of the documented API."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.kernels.activation import (
    activation_backward,
    activation_forward,
    activation_kind,
)
from transformer_engine.pytorch.kernels.dropout_add import bias_gradient
from transformer_engine.pytorch.kernels.gemm import gemm, gemm_into
from transformer_engine.pytorch.module.parameters import default_device
from transformer_engine.pytorch.scale_layout import layout_of
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor

__all__ = ["general_gemm"]


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """A placeholder to return to autograd for a gradient that was added to `main_grad`.

    Args:
        shape: the shape of the weight.
        dtype: the dtype of the weight.
        zero: fill it with zeros; else its values are undefined.

    >>> get_dummy_wgrad([2, 3], torch.bfloat16).shape
    torch.Size([2, 3])
    """
    make = torch.zeros if zero else torch.empty
    return make(shape, dtype=dtype, device=default_device(None))


_LAYOUTS = ("TN", "NN", "NT")
_GELU = activation_kind("gelu")
# Other arguments of the documented function, and the only values that are accepted for them.
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
    """A product of `A` and `B`, both plain or both quantised tensors.

    | layout | out | A | B |
    | --- | --- | --- | --- |
    | TN | `B A^T` `[m, n]` | `[n, k]` | `[m, k]` |
    | NN | `B A` `[m, n]` | `[k, n]` | `[m, k]` |
    | NT | `B^T A` `[m, n]` | `[k, n]` | `[k, m]` |

    Args:
        A: the right factor, as the table says.
        B: the left factor.
        out_dtype: dtype of the result; None is the (nominal) dtype of `B`.
        quantization_params: a quantizer for the result, or None.
        gelu: apply GELU (after the bias).
        gelu_in: multiply by GELU's derivative at this pre-activation instead.
        accumulate: add to `out`.
        layout: `"TN"`, `"NN"` or `"NT"`.
        out: write here; its dtype takes the place of `out_dtype`.
        bias: `[n]`, added; with `grad` only its dtype counts, see Returns.
        use_split_accumulator: partial sums of FP8 GEMMs are regularly added to an fp32 accumulator;
            with block scales they always are.
        grad: this is a product of a backward pass.
        others: `workspace` (not needed) and other arguments at their defaults.

    Returns:
        `(out, bias_grad, gelu_input, None)`: `bias_grad` with `grad` and `bias` is the sum of the
        rows of `B`, or of `out` with `gelu_in`; `gelu_input` with `gelu` is the pre-activation.

    Raises:
        ValueError: an unknown layout, or `accumulate` without `out`.
        TypeError: one factor is FP8 and the other is not; unknown arguments.
        NotImplementedError: arguments, or combinations of them, that are not implemented.

    >>> general_gemm(torch.ones(2, 3), torch.ones(4, 3))[0].shape
    torch.Size([4, 2])
    """
    _refuse(others)
    if layout not in _LAYOUTS:
        raise ValueError(f"[general_gemm] expected layout TN, NN or NT, got {layout!r}")
    fp8 = isinstance(A, QuantizedTensor)
    if fp8 is not isinstance(B, QuantizedTensor):
        raise TypeError(
            "[general_gemm] expected both factors in FP8 or both in high precision, got "
            f"{type(A).__name__} and {type(B).__name__}"
        )
    a, of_a = _factor("a", B, transposed=layout == "NT")
    b, of_b = _factor("b", A, transposed=layout != "TN")
    fast = not use_split_accumulator and (not fp8 or layout_of(of_a["a_format"]).fast_accumulation)
    sides = {**of_a, **of_b, "fast_accumulation": fast}
    activated = bool(gelu) or gelu_in is not None
    _check_target(out, accumulate, activated)
    bias_dtype = bias.dtype if grad and bias is not None else None
    _check_fp8(of_a.get("a_format"), activated, bias_dtype)
    added = None if grad else bias
    if out is None or activated:
        dtype = out.dtype if out is not None else out_dtype or B.dtype
        product = gemm(a, b, dtype, bias=added, **sides)
    else:
        product = out
        gemm_into(out, a, b, accumulate=accumulate, bias=added, **sides)
    before = bias_grad = None
    if bias_dtype is not None and gelu_in is None:
        bias_grad = bias_gradient(B, bias_dtype)
    result: Any = product
    if gelu_in is not None:
        result, *_, bias_grad = activation_backward(product, gelu_in, _GELU, dbias=bias_dtype)
    elif gelu:
        before, result = product, activation_forward(product, _GELU)[0]
    if out is not None:
        result = result if result is out else out.copy_(result)
    elif quantization_params is not None:
        result = quantization_params(result)
    return result, bias_grad, before, None


def _factor(name: str, x: torch.Tensor, transposed: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """A factor as the kernel takes it. The GEMM transposes plain factors; FP8 ones are before."""
    if not isinstance(x, QuantizedTensor):
        return x, {f"{name}_transposed": transposed}
    side = x.side(columnwise=transposed)
    if side is None:
        raise ValueError(
            f"[general_gemm] expected {'column' if transposed else 'row'}-wise data in a "
            f"{type(x).__name__}, got none"
        )
    return side.codes, {f"{name}_scales": side.scales, f"{name}_format": side.format}


def _check_target(out: torch.Tensor | None, accumulate: bool, activated: bool) -> None:
    if accumulate and out is None:
        raise ValueError("[general_gemm] expected out with accumulate=True, got None")
    if accumulate and activated:
        raise NotImplementedError("[general_gemm] accumulate=True with GELU")


def _check_fp8(format: int | None, activated: bool, bias_dtype: torch.dtype | None) -> None:
    """Refuse what GEMMs of FP8 factors do not support; the format of plain factors is None."""
    if format is None:
        return
    if bias_dtype is not None:
        raise NotImplementedError("[general_gemm] the bias gradient of FP8 factors")
    if activated and layout_of(format).in_blocks:
        raise NotImplementedError(
            "[general_gemm] Epilogue requested outside of the available: expected no GELU with"
            " block scales"
        )


def _refuse(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name == "workspace":
            continue
        if name not in _OTHERS:
            raise TypeError(f"general_gemm() got an unexpected keyword argument {name}")
        if value not in _OTHERS[name]:
            raise NotImplementedError(f"[general_gemm] {name}={value!r}")


def get_workspace() -> torch.Tensor:
    """An empty workspace for `general_gemm`, which needs none from callers.

    >>> get_workspace().numel()
    0
    """
    return torch.empty(0, dtype=torch.uint8)
