"""Cross entropy of a projection to a vocabulary, whose logits are never in memory all at once.

`logits_in_chunks.py` computes losses and gradients. With a mean or a sum, the backward receives one
number that multiplies all gradients. So the forward computes the gradients while it has the logits,
and the backward only multiplies. Without a reduction, the backward receives one number for each
token, which must be known before GEMMs sum over tokens. So the backward computes the logits again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from transformer_engine.pytorch._torch_private import not_differentiable
from transformer_engine.pytorch.chain.gemm import WgradTarget, main_grad_target
from transformer_engine.pytorch.cross_entropy.logits_in_chunks import (
    Chunks,
    Gradients,
    Problem,
    default_chunks,
    run,
)
from transformer_engine.pytorch.cross_entropy.parallel import (
    LEAST_TARGET,
    Rules,
    check_target,
    counted,
    group_of_several,
)
from transformer_engine.pytorch.dtypes import HIGH_PRECISION, in_autocast_dtype
from transformer_engine.pytorch.kernels.cast import cast
from transformer_engine.pytorch.module.arguments import check_sizes
from transformer_engine.pytorch.module.inputs import check_devices, check_plain, check_tensors
from transformer_engine.pytorch.parallel.groups import check_group

__all__ = ["linear_cross_entropy"]

_OP = "linear_cross_entropy"
_REDUCTIONS = ("mean", "sum", "none")
_FP8_MULTIPLE = 16  # sizes of FP8 GEMMs must be multiples of it


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    ignore_index: int = -100,
    dist_process_group: Any = None,
    chunk_tokens: int | None = None,
    fuse_wgrad_accumulation: bool = False,
    fp8: bool = False,
) -> torch.Tensor:
    """`cross_entropy(linear(hidden, weight, bias), target)` without the logits of all tokens.

    Only the logits of one chunk of tokens are in memory at a time, in the dtype of `hidden`. With a
    mean or a sum the forward also computes the gradients; without a reduction the backward computes
    the logits again. Gradients of the weight and of the bias are accumulated in fp32. Within
    `torch.autocast`, `hidden`, `weight` and `bias` are cast as by `torch.nn.functional.linear`.

    Args:
        hidden: `[..., features]`, fp32, fp16 or bf16.
        weight: `[classes, features]`, of the same dtype. If ranks share the classes, each has the
            same number of classes, in the order of the ranks.
        target: `[...]`, the class of each token, int64 or int32, counted over all ranks' classes.
        bias: `[classes]`, divided like `weight`.
        label_smoothing: share of the target that is spread evenly over all classes.
        reduction: `"mean"` over the tokens that are not ignored, `"sum"` or `"none"`.
        ignore_index: the target of tokens with neither loss nor gradient.
        dist_process_group: the ranks that share the classes. They must have equal `hidden`, whose
            gradient is summed over the ranks. None is this rank alone.
        chunk_tokens: how many tokens have logits and gradients of logits at a time, in FP8 rounded
            up to a multiple of 16; None is as many as 512 MiB hold.
        fuse_wgrad_accumulation: add the weight's gradient to `weight.main_grad`.
        fp8: multiply in FP8, whatever scope of `fp8_autocast` the call is in: `hidden` and `weight`
            in E4M3 with current scaling, gradients of logits in E5M2. Results keep their dtypes.

    Returns:
        fp32: one number, or `[...]` with `reduction="none"`. The mean of no tokens is 0. On a GPU,
        where the host does not wait to check targets, the loss of an invalid target is NaN.

    Raises:
        ValueError: shapes or devices that do not fit; in FP8, features or classes that are not
            multiples of 16; an unknown reduction; `fuse_wgrad_accumulation` without a
            `weight.main_grad`; on a CPU in eager mode, targets that are not classes.
        TypeError: other dtypes; a weight in FP8; settings of another type.
        RuntimeError: gradients of gradients.

    >>> hidden = torch.zeros(2, 8, requires_grad=True)
    >>> weight = torch.zeros(4, 8, requires_grad=True)
    >>> linear_cross_entropy(hidden, weight, torch.tensor([1, -100]), reduction="none")
    tensor([1.3863, 0.0000], grad_fn=<ViewBackward0>)
    """
    check_group(_OP, "dist_process_group", dist_process_group)
    own_bias = {} if bias is None else {"bias": bias}
    tensors = {"hidden": hidden, "weight": weight, "target": target, **own_bias}
    check_tensors(_OP, **tensors)
    check_devices(_OP, **tensors)
    check_plain(_OP, weight=weight)
    wants_grad, into = torch.is_grad_enabled(), WgradTarget(None)
    if fuse_wgrad_accumulation and wants_grad and weight.requires_grad:
        into = main_grad_target(weight, False, _OP)
    hidden, weight = in_autocast_dtype(hidden), in_autocast_dtype(weight)
    bias = None if bias is None else in_autocast_dtype(bias).contiguous()
    _check(hidden, weight, bias, target)
    _check_settings(reduction, chunk_tokens, fp8)
    check_sizes(_OP, None, LEAST_TARGET, ignore_index=ignore_index)
    rules = Rules(label_smoothing, ignore_index, group_of_several(dist_process_group))
    check_target(_OP, target, weight.shape[0], rules)
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    chunks = default_chunks(rows.shape[0], weight.shape[0], rows.dtype, fp8)
    if chunk_tokens is not None:
        tokens = chunk_tokens + (-chunk_tokens % _FP8_MULTIPLE if fp8 else 0)
        chunks = Chunks(tokens, tokens)
    if fp8:
        _check_fp8_sizes(weight)
        padding = -rows.shape[0] % _FP8_MULTIPLE
        if padding:
            rows = pad(rows, (0, 0, 0, padding))
            labels = pad(labels, (0, padding), value=ignore_index)
    losses: torch.Tensor = _LinearCrossEntropy.apply(
        *(rows.contiguous(), weight.contiguous(), bias, labels, into.main_grad),
        *(rules, reduction, (chunks, fp8), wants_grad, into),
    )
    return losses[: target.numel()].view(target.shape) if reduction == "none" else losses


def _check(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor
) -> None:
    dtypes = [x.dtype for x in (hidden, weight, bias) if x is not None]
    if dtypes[0] not in HIGH_PRECISION or any(dtype is not dtypes[0] for dtype in dtypes):
        raise TypeError(
            f"[{_OP}] expected hidden, weight and bias of one dtype, float32, float16 or bfloat16,"
            f" got {', '.join(map(str, dtypes))}"
        )
    fit = hidden.ndim > 0 and weight.ndim == 2 and 0 not in weight.shape
    if not fit or hidden.shape[-1] != weight.shape[1] or hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"[{_OP}] expected hidden [..., features], weight [classes, features] and target [...],"
            f" got {tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(target.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"[{_OP}] expected bias [{weight.shape[0]}] of the weight's classes, got "
            f"{tuple(bias.shape)}"
        )


def _check_fp8_sizes(weight: torch.Tensor) -> None:
    if any(size % _FP8_MULTIPLE for size in weight.shape):
        raise ValueError(
            f"[{_OP}] expected classes and features in multiples of {_FP8_MULTIPLE} with fp8=True, "
            f"got a weight {tuple(weight.shape)}"
        )


def _check_settings(reduction: str, chunk_tokens: Any, fp8: Any) -> None:
    if not isinstance(fp8, bool):
        raise TypeError(f"[{_OP}] expected fp8 to be a bool, got {type(fp8).__name__}")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"[{_OP}] expected reduction in {_REDUCTIONS}, got {reduction!r}")
    if chunk_tokens is not None:
        check_sizes(_OP, None, chunk_tokens=chunk_tokens)


def _scaled(x: torch.Tensor | None, factor: torch.Tensor, dtype: torch.dtype) -> Any:
    """`x * factor`, rounded once to `dtype`."""
    return None if x is None else cast(x, dtype, factor.view(1))


class _LinearCrossEntropy(torch.autograd.Function):
    """Losses `[tokens]`, or their mean or sum, with a backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        main_grad: torch.Tensor | None,
        *how: Any,
    ) -> torch.Tensor:
        rules, reduction, chunking, wants_grad, into = how
        problem = Problem(hidden, weight, bias, target, rules, *chunking)
        ctx.main_grad = main_grad  # not saved: other backwards may write it before this one
        wanted = [wants_grad and wants for wants in ctx.needs_input_grad[:3]]
        ctx.how = rules, reduction, chunking, wanted, into
        ctx.dtypes = hidden.dtype, weight.dtype
        if reduction == "none":
            ctx.save_for_backward(hidden, weight, bias, target)
            return run(problem, (False, False, False), None)[0]
        losses, gradients = run(problem, wanted, None)
        total, divisor = losses.sum(), losses.new_ones(())
        if reduction == "mean":
            divisor = counted(target, rules.ignored).float()
        ctx.save_for_backward(*gradients, divisor)
        return total / divisor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return _backward(ctx, grad)
        with torch.no_grad():
            found = _backward(ctx, grad)
        return not_differentiable(found, _OP)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradients of the arguments of `_LinearCrossEntropy`."""
    rules, reduction, chunking, wanted, into = ctx.how
    saved, main_grad = ctx.saved_tensors, ctx.main_grad
    if reduction == "none":
        hidden, weight, bias, target = saved
        problem = Problem(hidden, weight, bias, target, rules, *chunking)
        gradients = run(problem, wanted, grad.contiguous())[1]
        factor = grad.new_ones(())
    else:
        *found, divisor = saved
        gradients, factor = Gradients(*found), grad / divisor
    hidden_dtype, dtype = ctx.dtypes
    by_hidden = _scaled(gradients.hidden, factor, hidden_dtype)
    if by_hidden is not None and rules.group is not None:
        dist.all_reduce(by_hidden, group=rules.group)
    if main_grad is None:
        by_weight = _scaled(gradients.weight, factor, dtype)
    else:
        added = _scaled(gradients.weight, factor, main_grad.dtype)
        into.settled()._replace(main_grad=main_grad).store(added)
        by_weight = into.placeholder()
    return by_hidden, by_weight, _scaled(gradients.bias, factor, dtype), *[None] * 7
