"""Matrix products: cuBLASLt on CUDA, torch's matmul on the CPU.

`csrc/ops/gemm.h` is the contract; `_define` below writes it in torch and is what runs on the CPU.
Operands are row-major matrices (all axes but the last count together as rows):

    fprop   y[M, N]  = x[M, K]    w[N, K]^T    gemm(x, w)
    dgrad   dx[M, K] = dy[M, N]   w[N, K]      gemm(dy, w, b_transposed=True)
    wgrad   dw[N, K] = dy[M, N]^T x[M, K]      gemm(dy, x, a_transposed=True, b_transposed=True)

An FP8 operand consists of one-byte codes, a format (5 = E4M3, 6 = E5M2) and scales whose element 0
is 1/scale. The product never transposes it: pass the transpose that the cast has stored. If one
operand has block scales (`kernels.quantize_blocks`), so has the other, and at least one of them has
blocks of 1 x 128; codes are E4M3, and sums are in fp32. If such a product has fewer columns or
terms than a block, torch multiplies the dequantised operands, also on a GPU.

On a GPU that cannot multiply FP8 codes (see `_devices.py`) they are converted to bf16, which
represents each of them exactly, and multiplied in bf16. As in the definition, sums are in fp32 and
are multiplied by the scales afterwards.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import nullcontext
from typing import Any

import torch

from transformer_engine import _C, _devices
from transformer_engine.pytorch._torch_private import (
    allows_tf32,
    dispatch_modes,
    without_modes,
)
from transformer_engine.pytorch.dtypes import TORCH_FP8, without_autocast
from transformer_engine.pytorch.kernels.cast import cast
from transformer_engine.pytorch.kernels.library import library_op
from transformer_engine.pytorch.kernels.memory import new_empty
from transformer_engine.pytorch.kernels.memory_views import tensor_at
from transformer_engine.pytorch.kernels.shapes import matrix_shape
from transformer_engine.pytorch.scale_layout import ScaleLayout, layout_of

PLAIN = -1
_BIAS_ALIGNMENT = 16  # bytes


@library_op()
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    dtype: torch.dtype,
    a_scales: torch.Tensor | None = None,
    b_scales: torch.Tensor | None = None,
    a_format: int = PLAIN,
    b_format: int = PLAIN,
    a_transposed: bool = False,
    b_transposed: bool = False,
    fast_accumulation: bool = False,
    bias: torch.Tensor | None = None,
    allow_tf32: bool | None = None,
    addend: torch.Tensor | None = None,
    *,
    launch: bool = True,
) -> torch.Tensor:
    """`d = a b^T + addend + bias` in a fresh tensor.

    It is `[..., n]` with the leading sizes of `a`; `[m, n]` where `a_transposed`.

    Args:
        a: `[..., k]`, or `[..., m]` with the leading sizes as k where `a_transposed`.
        b: `[n, k]`, or `[..., n]` with the leading sizes as k where `b_transposed`.
        dtype: dtype of the result. For plain operands it is their dtype or fp32; for FP8 operands
            it is fp32, fp16 or bf16.
        a_scales: fp32, element 0 = 1/scale of FP8 `a`; or the inverse scales of its blocks.
        b_scales: the same for `b`.
        a_format: the FP8 format of `a`; -1 for a plain tensor.
        b_format: the same for `b`.
        a_transposed: sum over the leading axes of `a`.
        b_transposed: sum over the leading axes of `b`.
        fast_accumulation: FP8 sums may stay in the tensor core's short accumulator.
        bias: `[n]`, rounded to the result's dtype first (for FP8 operands: fp16 if the result is
            fp16, else bf16).
        allow_tf32: multiply fp32 operands on the tensor cores, in TF32; None is what
            `torch.backends.cuda.matmul` says.
        addend: a matrix of the sizes and the dtype of the result; it is added before rounding.
    """
    n = b.shape[-1 if b_transposed else 0]
    sizes = a.shape
    if a_transposed:
        shape = (sizes[-1], n)
    else:
        shape = (sizes[0], n) if len(sizes) == 2 else (*sizes[:-1], n)  # a slice costs 0.3 us
    d = new_empty(a, shape, dtype)
    if bias is not None:
        bias = bias_for(dtype, bias, a_format)
    if launch:
        sides = (a, b, a_scales, b_scales, a_format, b_format, a_transposed, b_transposed)
        _multiply(d, sides, fast_accumulation, addend, bias, allow_tf32)
    return d


@library_op(writes=("d",))
def gemm_into(
    d: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor | None = None,
    b_scales: torch.Tensor | None = None,
    a_format: int = PLAIN,
    b_format: int = PLAIN,
    a_transposed: bool = False,
    b_transposed: bool = False,
    accumulate: bool = True,
    fast_accumulation: bool = False,
    bias: torch.Tensor | None = None,
    allow_tf32: bool | None = None,
    *,
    launch: bool = True,
) -> None:
    """`d += a b^T`, or `d = a b^T + bias` without `accumulate`: a product into a given tensor.

    The other arguments are those of `gemm`.
    """
    if bias is not None:
        bias = bias_for(d.dtype, bias, a_format)
    if launch:
        sides = (a, b, a_scales, b_scales, a_format, b_format, a_transposed, b_transposed)
        _multiply(d, sides, fast_accumulation, d if accumulate else None, bias, allow_tf32)


def _multiply(
    d: torch.Tensor,
    sides: Any,
    fast_accumulation: bool,
    addend: torch.Tensor | None,
    bias: torch.Tensor | None,
    allow_tf32: bool | None,
) -> None:
    """The product of two sides: by cuBLASLt, or by `_define` if `_C` leaves it to torch."""
    if allow_tf32 is None:
        allow_tf32 = sides[0].dtype is not torch.float32 or allows_tf32()
    arguments: Any = (d, *sides, fast_accumulation, addend, bias, allow_tf32)
    if not _C.gemm(*arguments):
        _define(*arguments)


def bias_for(dtype: torch.dtype, bias: torch.Tensor, a_format: int) -> torch.Tensor:
    """The bias in the dtype that the product reads (`te::gemm_bias_dtype`)."""
    wanted = dtype if a_format == PLAIN or dtype is torch.float16 else torch.bfloat16
    return cast(bias, wanted)


@torch.no_grad()
def _define(
    d: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor | None,
    b_scales: torch.Tensor | None,
    a_format: int,
    b_format: int,
    a_transposed: bool,
    b_transposed: bool,
    fast_accumulation: bool,
    addend: torch.Tensor | None,
    bias: torch.Tensor | None,
    allow_tf32: bool,
) -> None:
    """The definition of the product: in fp32, also under torch.autocast, and rounded at the end."""
    # `fast_accumulation` and `allow_tf32` permit less than fp32; the definition does not use it.
    if d.is_cuda and a_format != PLAIN:
        # cuBLASLt refuses a bias of FP8 products that is not aligned, as in an optimizer's buffer.
        if bias is not None and bias.data_ptr() % _BIAS_ALIGNMENT:
            sides = (a, b, a_scales, b_scales, a_format, b_format, a_transposed, b_transposed)
            if _C.gemm(d, *sides, fast_accumulation, addend, bias.clone(), allow_tf32):
                return
        sizes = d.shape[:-1].numel(), b.shape[0], b.shape[-1]
        _announce_replacement(d.device.index, sizes, layout_of(a_format))
    with without_autocast(d.device.type):
        value = _value(a, b, a_scales, b_scales, a_format, b_format, a_transposed, b_transposed)
        if addend is not None:
            # Not in place: a selective checkpoint may have saved `value`.
            value = value + addend.view(value.shape)
        if bias is not None:
            value = value + bias
        d.copy_(value.view(d.shape))


def _announce_replacement(index: int, sizes: tuple[int, int, int], layout: ScaleLayout) -> None:
    """Warn that an FP8 product runs without FP8 kernels: it is exact, but takes longer."""
    m, n, k = sizes
    if m and k and min(n, k) >= layout.run:
        limits = _devices.device_limits(index)
        what = "block scales" if layout.in_blocks else "FP8 operands"
        reason = _devices.why_no_product(limits, layout.in_blocks)
        reason = reason or f"cuBLASLt has no kernel for {what} at m = {m}, n = {n}, k = {k}"
        _announce_slow_product(f"[gemm] {reason}: {_devices.replacement(layout.in_blocks)}")


@functools.cache
def _announce_slow_product(text: str) -> None:
    """Warn once for each text: for each kind of GPU, or for each size if only some are slow."""
    warnings.warn(text, stacklevel=4)


def _define_at(*arguments: Any) -> None:
    """`_define` for a recorded call, whose tensors are `(address, dtype, sizes, device)`."""
    # A selective checkpoint may keep views, but these tensors do not own their memory.
    with without_modes() if dispatch_modes() else nullcontext():
        tensors: list[Any] = [tensor_at(*a) if isinstance(a, tuple) else a for a in arguments]
        _define(*tensors)


_C.set_gemm_definition(_define_at)


def _matrix(
    operand: torch.Tensor, scales: torch.Tensor | None, format: int, transposed: bool
) -> torch.Tensor:
    """The operand as fp32 `[m or n, k]`; only scales of blocks are applied."""
    rows, columns = matrix_shape(operand.shape)
    if format == PLAIN:
        matrix = operand.reshape(rows, columns).to(torch.float32)
    elif layout_of(format).in_blocks:
        matrix = operand.new_empty((rows, columns), dtype=torch.float32)
        _C.dequantize(operand.reshape(rows, columns), format, scales, matrix)
    else:
        values = _values(format, operand.device)
        matrix = values.index_select(0, operand.reshape(-1).int()).view(rows, columns)
    return matrix.t() if transposed else matrix


@functools.cache
def _values(format: int, device: torch.device) -> torch.Tensor:
    """The values of the 256 codes: a look-up takes a seventh of the time of torch's cast."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    return codes.view(TORCH_FP8[format]).to(torch.float32)


def _value(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor | None,
    b_scales: torch.Tensor | None,
    a_format: int,
    b_format: int,
    a_transposed: bool,
    b_transposed: bool,
) -> torch.Tensor:
    if a.is_cuda and a_format != PLAIN and not layout_of(a_format).in_blocks:
        value = _product_of_codes(a, b, a_format, b_format)
    else:
        value = (
            _matrix(a, a_scales, a_format, a_transposed)
            @ _matrix(b, b_scales, b_format, b_transposed).t()
        )
    if a_scales is not None and b_scales is not None and not layout_of(a_format).in_blocks:
        value = value * (a_scales[0] * b_scales[0])
    return value


def _product_of_codes(
    a: torch.Tensor, b: torch.Tensor, a_format: int, b_format: int
) -> torch.Tensor:
    """`a b^T` of FP8 codes in fp32, `[m, n]`: by bf16 tensor cores on a GPU."""
    plain_a, plain_b = (
        codes.reshape(matrix_shape(codes.shape)).view(TORCH_FP8[format]).to(torch.bfloat16)
        for codes, format in ((a, a_format), (b, b_format))
    )
    value = a.new_empty((plain_a.shape[0], plain_b.shape[0]), dtype=torch.float32)
    gemm_into(value, plain_a, plain_b, accumulate=False)
    return value
