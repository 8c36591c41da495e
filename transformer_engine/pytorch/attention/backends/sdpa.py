"""torch's scaled_dot_product_attention: cuDNN on Hopper, else flash, memory-efficient or plain.

The log-sum-exp has the layout of the kernel that torch chooses (`sdpa_kernels.py`); for thd it is
that of the padded sequences. Attention that torch composes of other operators has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from transformer_engine.pytorch._torch_private import (
    choose_sdpa,
    sdpa_order,
    set_sdpa_order,
    transforms_active,
)
from transformer_engine.pytorch.attention.backends import local_graph
from transformer_engine.pytorch.attention.backends.backend import (
    FEW_ELEMENTS,
    HIGH_PRECISION,
    MOST_ELEMENTS,
    NO_BIAS,
    NO_SINK,
    SOME_WEIGHTS,
    SOMETHING,
    Backend,
    Gradients,
    Inputs,
    KernelParts,
    Needs,
    Requirement,
    Saved,
)
from transformer_engine.pytorch.attention.backends.dense import Kernel, dense, dense_parts
from transformer_engine.pytorch.attention.backends.sdpa_kernels import (
    Arguments,
    SdpaKernel,
    kernel_of,
    sum_repeated,
)
from transformer_engine.pytorch.attention.backends.strides import readable
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.attention.masks.masks import Mask
from transformer_engine.pytorch.capture import memoize

_CUDNN = SDPBackend.CUDNN_ATTENTION.value
_RIGHT_IF_LARGE = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_TORCH_ORDER: list[int] = sdpa_order()
_OTHERS = [backend for backend in _TORCH_ORDER if backend != _CUDNN]
_CUDNN_FIRST, _CUDNN_LAST = [_CUDNN, *_OTHERS], [*_OTHERS, _CUDNN]

R = TypeVar("R")


class _Facts(NamedTuple):
    """What the backward depends on.

    Attributes:
        kernel: the pair that ran; None if autograd's graph is saved instead.
        arguments: arguments of the kernel, without the mask.
        groups: number of key and value heads before they were repeated for a mask.
    """

    kernel: SdpaKernel | None
    arguments: Arguments
    groups: int


def _forward(
    inputs: Inputs, mask: Mask, bias: torch.Tensor | None, call: Call, needs: Needs
) -> tuple[torch.Tensor, Saved | None]:
    """softmax(scale * query @ key^T) @ value, over the keys that the mask lets through."""
    assert bias is None, "the table of requirements refuses it"
    query, key, value = inputs
    seen = blind = None
    groups = key.shape[1]
    per_group = query.shape[1] // max(1, groups)
    masked = not (mask.full or mask.causal)
    differentiated = any(needs) or (not torch.compiler.is_compiling() and transforms_active())
    large = differentiated and _is_large(inputs, per_group if masked else 1)
    if per_group > 1 and (masked or large):  # kernels that take these do not support groups
        key, value = (x.repeat_interleave(per_group, dim=1) for x in (key, value))
    if masked:
        seen, blind = _seen(mask, query, key)
    grouped = per_group > 1 and not (masked or large)
    arguments = Arguments(seen, call.dropout.p, mask.causal, call.scale, grouped)
    inputs = (readable(query), readable(key), readable(value))
    order = None if large else _order(query, key, bool(call.cache), differentiated, mask.causal)
    with sdpa_kernel(_RIGHT_IF_LARGE) if large else nullcontext():
        if not any(needs):
            out, saved = _attend(*inputs, arguments, order), None
        else:
            kernel = _in_order(order, lambda: _kernel(inputs, arguments))
            if kernel is None:
                run = partial(_attend, arguments=arguments, order=order)
                out, saved = local_graph.forward(run, inputs, needs[:3])
            else:
                out, saved = kernel.forward(inputs, arguments, needs)
            saved = saved.wrap((blind,), _Facts(kernel, arguments._replace(mask=None), groups))
    return out if blind is None else out.masked_fill(blind, 0), saved


def _backward(grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
    """See `dense.Kernel`."""
    inner, (blind,), (kernel, arguments, groups) = saved.unwrap()
    if blind is not None:
        grad = grad.masked_fill(blind, 0)
    if kernel is None:
        found = local_graph.backward(grad, inner, needs[:3])
    else:
        found = kernel.backward(readable(grad), inner, arguments, needs)[:3]
    query, key, value, *_ = needs.pick(*found)
    return Gradients(
        query,
        None if key is None else sum_repeated(key, groups),
        None if value is None else sum_repeated(value, groups),
    )


def _log_sum_exp(saved: Saved) -> torch.Tensor:
    """See `KernelParts`; some of torch's kernels return a padded number of queries."""
    inner, (blind,), _ = saved.unwrap()
    found = inner.log_sum_exp
    if found is None:
        raise RuntimeError(
            "[attention] expected a kernel of torch that returns its log-sum-exp, which context"
            " parallelism needs, got one that does not; set NVTE_FLASH_ATTN=0 and NVTE_FUSED_ATTN=0"
        )
    found = found.flatten(2, 3) if found.dim() == 4 else found
    found = found[:, :, : inner.tensors[3].shape[2]]
    return found if blind is None else found.masked_fill(blind.squeeze(-1), -math.inf)


def _strip(saved: Saved) -> Saved:
    inner, tensors, facts = saved.unwrap()
    log_sum_exp = inner.log_sum_exp
    assert log_sum_exp is not None
    shape = log_sum_exp.shape
    stripped = Saved(None, inner.tensors[4:], (inner.facts, shape))
    return stripped.wrap(tensors, facts)


def _restore(stripped: Saved, tensors: tuple[torch.Tensor, ...], lse: torch.Tensor) -> Saved:
    query, key, value, out = tensors
    query, key, value = readable(query), readable(key), readable(value)
    inner, (blind,), facts = stripped.unwrap()
    inner_facts, shape = inner.facts
    if key.shape[1] != query.shape[1] and not facts.arguments.grouped:
        per_group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(per_group, dim=1) for x in (key, value))
    if blind is not None:  # the kernel shows them all keys; +inf makes these weights zero
        lse = lse.masked_fill(blind.squeeze(-1), math.inf)
    whole = lse.new_full(shape, math.inf)
    whole.flatten(2)[:, :, : lse.shape[2]] = lse
    # Kernels expect the result as they wrote it: [batch, sequence, heads, size] in memory.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    found = Saved(whole, (query, key, value, out, *inner.tensors), inner_facts)
    return found.wrap((blind,), facts)


def _seen(
    mask: Mask, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The keys that each query sees, and the queries that see none (None if there cannot be any).

    Some kernels compute NaN for a query that sees no key. So such a query is shown all keys, and
    its result and its gradient are set to zero.
    """
    queries, keys = query.shape[2], key.shape[2]
    hidden = mask.dense(queries, keys, query.device)
    assert hidden is not None, "only a full mask hides nothing"
    hidden = torch.atleast_2d(hidden)
    hidden = hidden.expand(*hidden.shape[:-1], keys)  # no kernel broadcasts over keys
    if not mask.may_blind(queries, keys):
        return ~hidden, None
    blind = hidden.all(-1, keepdim=True)
    return ~hidden | blind, blind


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: Arguments,
    order: list[int] | None,
) -> torch.Tensor:
    """What torch's own function returns, with its kernels in this order."""
    inputs = (query, key, value)
    return _in_order(
        order,
        lambda: scaled_dot_product_attention(*inputs, *arguments[:3], **arguments.keywords),
    )


def _kernel(inputs: Inputs, arguments: Arguments) -> SdpaKernel | None:
    """The operator that torch's function would call, with its backward; None if it is unknown."""
    query, key, value = inputs
    with torch.enable_grad():  # torch looks whether gradients are needed
        return kernel_of((query.detach().requires_grad_(), key, value), arguments)


@memoize
def _has_fast_cudnn(device: int) -> bool:
    """Whether cuDNN is the fastest kernel of torch on a GPU: on Hopper and later.

    torch puts cuDNN first in its order when it chooses a kernel for the first time. This function
    makes it choose one, so that `_in_order` finds that order and restores it for the user's own
    calls of torch's function.
    """
    fast = bool(_TORCH_ORDER) and torch.cuda.get_device_capability(device)[0] >= 9
    if fast and choose_sdpa is not None:
        choose_sdpa(*[torch.empty(1, 1, 8, 64, dtype=torch.float16, device=f"cuda:{device}")] * 3)
    return fast


def _is_large(inputs: Inputs, copies: int) -> bool:
    """Whether the fast kernels of torch have wrong gradients, see `FEW_ELEMENTS`.

    A kernel gets every key and value `copies` times.
    """
    query, key, value = inputs
    size, other = query.shape[-1], value.shape[-1]  # the result has heads of the other size
    elements = max(query.numel(), copies * key.numel()) // size * max(size, other)
    return query.is_cuda and elements >= MOST_ELEMENTS


def _order(
    query: torch.Tensor, key: torch.Tensor, cached: bool, recorded: bool, causal: bool
) -> list[int] | None:
    """The order in which torch should try its kernels; None to leave the order as it is.

    cuDNN comes first on GPUs where it is twice as fast as torch's flash attention (version 2). It
    comes last if keys are cached, because it would build a plan, which takes 10 to 100 ms, for each
    length of the cache and of a prompt. It also comes last if its gradients may be NaN, see
    `attention_key.cpp`. An order that the user has set is not changed, and kernels that the user
    has switched off stay off.
    """
    if (
        query.device.type != "cuda"
        or torch.compiler.is_compiling()
        or not _has_fast_cudnn(query.device.index)
        or sdpa_order() not in (_TORCH_ORDER, _CUDNN_FIRST)
    ):
        return None
    queries, keys = query.shape[2], key.shape[2]
    inference = not (recorded or torch.is_grad_enabled())
    misses_tail = keys % 128 == 64 and not (causal and queries <= keys)
    if cached or (queries < keys and inference) or (recorded and (misses_tail or queries == 1)):
        return _CUDNN_LAST
    return _CUDNN_FIRST


def _in_order(order: list[int] | None, run: Callable[[], R]) -> R:
    """`run()` with torch's kernels in this order.

    `torch.nn.attention.sdpa_kernel(..., set_priority=True)` does the same and takes 20 us more.
    """
    if order is None:
        return run()
    before = sdpa_order()
    set_sdpa_order(order)
    try:
        return run()
    finally:
        set_sdpa_order(before)


forward, backward = dense(Kernel(_forward, _backward))

BACKEND = Backend(
    "sdpa",
    forward,
    backward,
    keeps_scores=False,
    requirements=(
        Requirement(
            lambda problem, allowed: allowed.fused or allowed.flash,
            "switched off by NVTE_FUSED_ATTN=0 and NVTE_FLASH_ATTN=0; set either to 1",
        ),
        HIGH_PRECISION,
        NO_BIAS,
        NO_SINK,
        SOME_WEIGHTS,  # on a GPU, 0 / 0 in torch's fused kernels
        SOMETHING,
        Requirement(
            lambda problem, allowed: not problem.compiling or FEW_ELEMENTS.holds(problem, allowed),
            "has wrong gradients of tensors of 2^31 elements and more in compiled code; give parts"
            " of the batch",
        ),
        Requirement(
            lambda problem, allowed: (
                not problem.part
                or (
                    problem.key_size == problem.value_size
                    and (problem.device == "cpu" or problem.dtype is not torch.float32)
                    and (problem.device == "cpu" or problem.key_size % 8 == 0)
                    and (problem.device != "cpu" or problem.dropout == 0.0)
                )
            ),
            "may run a kernel that returns no log-sum-exp, which context parallel ranks need",
        ),
        Requirement(
            lambda problem, allowed: (
                problem.device == "cpu" or not (problem.repeatable and problem.training)
            ),
            "its gradients on a GPU may not repeat bit for bit, as"
            " NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 or torch.use_deterministic_algorithms asks",
        ),
    ),
    differentiable=True,
    parts=dense_parts(KernelParts(_log_sum_exp, _strip, _restore)),
)
