"""What `torch.nn.functional.scaled_dot_product_attention` runs, as pairs of functions.

torch's function chooses an operator, prepares its inputs and leaves the rest to autograd. This file
has the operators with their backward and the work that torch does around them, and attention as
torch composes it if no operator fits (`aten/src/ATen/native/transformers/attention.cpp`, torch 2.8
to 2.15).

All these names are private to torch. An operator is used only if its arguments have the names that
are listed here; if this torch has other arguments, `kernel_of` returns None.

The log-sum-exp is `[batch, heads, queries]`. The memory-efficient kernel may round the number of
queries up, and cuDNN adds a last dimension of size 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad

from transformer_engine.pytorch._torch_private import choose_sdpa
from transformer_engine.pytorch.attention.backends.backend import Gradients, Inputs, Needs, Saved
from transformer_engine.pytorch.attention.backends.dropout import dropout, dropout_backward


class Arguments(NamedTuple):
    """The arguments of `scaled_dot_product_attention` beside query, key and value.

    Attributes:
        mask: bool, True where a query sees a key, broadcastable to `[batch, heads, queries, keys]`;
            or None.
        dropout: probability.
        causal: a query sees keys up to its own position.
        scale: factor on the scores.
        grouped: there are fewer heads of keys and values than of queries.
    """

    mask: torch.Tensor | None
    dropout: float
    causal: bool
    scale: float
    grouped: bool

    @property
    def keywords(self) -> dict[str, Any]:
        """Scale and groups as torch's function takes them."""
        return {"scale": self.scale, "enable_gqa": self.grouped}


class SdpaKernel(NamedTuple):
    """A pair of functions, for tensors `[batch, heads, sequence, size]`.

    Attributes:
        forward: `forward((query, key, value), arguments, needs)` returns the result and `Saved`.
        backward: `backward(grad, saved, arguments, needs)`, with the arguments of the forward but
            without the mask.
    """

    forward: Callable[[Inputs, Arguments, Needs], tuple[torch.Tensor, Saved]]
    backward: Callable[[torch.Tensor, Saved, Arguments, Needs], Gradients]


_KERNELS: dict[tuple[int, str], SdpaKernel] = {}


def kernel_of(inputs: Inputs, arguments: Arguments) -> SdpaKernel | None:
    """The pair for the operator that torch chooses; None if this torch has an unknown one.

    The choice depends on `requires_grad` of the inputs, and on whether gradients are switched on.
    """
    if choose_sdpa is None:
        return None
    choice = choose_sdpa(*inputs, *arguments[:3], **arguments.keywords)
    return _KERNELS.get((choice, inputs[0].device.type))


def _operator(name: str, arguments: str) -> Any:
    """An operator of aten; None unless it has these arguments."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return None
    known = " ".join(argument.name for argument in packet.default._schema.arguments)
    return packet.default if known == arguments else None


def _offer(choice: SDPBackend, device: str, pair: SdpaKernel, *private: Any) -> None:
    """Register a pair, if torch has all private functions that it calls."""
    if all(function is not None for function in private):
        _KERNELS[choice.value, device] = pair


def _addend(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Zero where a query sees a key, else -inf."""
    if mask is None:
        return None
    hidden = torch.full((), -math.inf, dtype=dtype, device=mask.device)
    return torch.where(mask, 0.0, hidden)


# CPU: torch's own flash attention.

_flash_cpu = _operator(
    "_scaled_dot_product_flash_attention_for_cpu",
    "query key value dropout_p is_causal attn_mask scale",
)
_flash_cpu_backward = _operator(
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale",
)


def _run_flash_cpu(
    inputs: Inputs, arguments: Arguments, needs: Needs
) -> tuple[torch.Tensor, Saved]:
    mask, p, causal, scale, _ = arguments
    mask = _addend(mask, inputs[0].dtype)
    out, lse = _flash_cpu(*inputs, p, causal, attn_mask=mask, scale=scale)
    return out, Saved(lse, (*inputs, out, mask))


def _back_flash_cpu(
    grad: torch.Tensor, saved: Saved, arguments: Arguments, needs: Needs
) -> Gradients:
    *inputs, mask = saved.tensors
    _, p, causal, scale, _ = arguments
    tensors = (grad, *inputs, saved.log_sum_exp)
    return Gradients(*_flash_cpu_backward(*tensors, p, causal, attn_mask=mask, scale=scale))


_offer(
    *(SDPBackend.FLASH_ATTENTION, "cpu", SdpaKernel(_run_flash_cpu, _back_flash_cpu)),
    *(_flash_cpu, _flash_cpu_backward),
)

# CUDA: flash attention 2. It takes heads whose size is divisible by 8, so heads are padded to that.

_flash = _operator(
    "_scaled_dot_product_flash_attention",
    "query key value dropout_p is_causal return_debug_mask scale",
)
_flash_backward = _operator(
    "_scaled_dot_product_flash_attention_backward",
    "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
    " philox_seed philox_offset scale",
)


def _padded(x: torch.Tensor) -> torch.Tensor:
    missing = -x.shape[-1] % 8
    return pad(x, (0, missing)) if missing else x


def _cut(x: torch.Tensor, size: int) -> torch.Tensor:
    return x if x.shape[-1] == size else x[..., :size]


def _run_flash(inputs: Inputs, arguments: Arguments, needs: Needs) -> tuple[torch.Tensor, Saved]:
    _, p, causal, scale, _ = arguments
    size = inputs[0].shape[-1]
    padded = tuple([_padded(x) for x in inputs])
    found = _flash(*padded, p, causal, False, scale=scale)
    out, lse, ends_q, ends_k, max_q, max_k, seed, offset, _ = found
    tensors = (*padded, out, ends_q, ends_k, seed, offset)
    return _cut(out, size), Saved(lse, tensors, (max_q, max_k, size))


def _back_flash(grad: torch.Tensor, saved: Saved, arguments: Arguments, needs: Needs) -> Gradients:
    *inputs, out, ends_q, ends_k, seed, offset = saved.tensors
    max_q, max_k, size = saved.facts
    _, p, causal, scale, _ = arguments
    tensors = (_padded(grad), *inputs, out, saved.log_sum_exp, ends_q, ends_k)
    found = _flash_backward(*tensors, max_q, max_k, p, causal, seed, offset, scale=scale)
    return Gradients(*[_cut(x, size) for x in found])


_offer(
    *(SDPBackend.FLASH_ATTENTION, "cuda", SdpaKernel(_run_flash, _back_flash)),
    *(_flash, _flash_backward),
)

# CUDA: memory-efficient attention.

_efficient = _operator(
    "_scaled_dot_product_efficient_attention",
    "query key value attn_bias compute_log_sumexp dropout_p is_causal scale",
)
_efficient_backward = _operator(
    "_scaled_dot_product_efficient_attention_backward",
    "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p"
    " grad_input_mask is_causal scale",
)


def _aligned(mask: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The mask expanded to a shape, with rows that begin at multiples of 8 elements."""
    if any(stride % 8 for stride in mask.stride()[:-1]) or mask.stride(-1) != 1:
        keys = mask.shape[-1]
        mask = pad(mask, (0, 8 - keys % 8))[..., :keys]
    return mask.expand(shape)


def _run_efficient(
    inputs: Inputs, arguments: Arguments, needs: Needs
) -> tuple[torch.Tensor, Saved]:
    mask, p, causal, scale, _ = arguments
    mask = _addend(mask, inputs[0].dtype)
    if mask is not None:
        mask = _aligned(mask, (*inputs[0].shape[:3], inputs[1].shape[2]))
    out, lse, *seeds = _efficient(*inputs, mask, True, p, causal, scale=scale)
    return out, Saved(lse, (*inputs, out, mask, *seeds))


def _back_efficient(
    grad: torch.Tensor, saved: Saved, arguments: Arguments, needs: Needs
) -> Gradients:
    query, key, value, out, mask, seed, offset = saved.tensors
    _, p, causal, scale, _ = arguments
    tensors = (grad, query, key, value, mask, out, saved.log_sum_exp, seed, offset)
    found = _efficient_backward(*tensors, p, [*needs[:3], False], causal, scale=scale)
    return Gradients(*found[:3])


_offer(
    *(SDPBackend.EFFICIENT_ATTENTION, "cuda", SdpaKernel(_run_efficient, _back_efficient)),
    *(_efficient, _efficient_backward),
)

# CUDA: cuDNN.

_cudnn = _operator(
    "_scaled_dot_product_cudnn_attention",
    "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale",
)
_cudnn_backward = _operator(
    "_scaled_dot_product_cudnn_attention_backward",
    "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q"
    " cum_seq_k max_q max_k dropout_p is_causal scale",
)


def _run_cudnn(inputs: Inputs, arguments: Arguments, needs: Needs) -> tuple[torch.Tensor, Saved]:
    mask, p, causal, scale, _ = arguments
    mask = _addend(mask, inputs[0].dtype)
    found = _cudnn(*inputs, mask, True, p, causal, False, scale=scale)
    out, lse, ends_q, ends_k, max_q, max_k, seed, offset, _ = found
    return out, Saved(lse, (*inputs, out, seed, offset, mask, ends_q, ends_k), (max_q, max_k))


def _back_cudnn(grad: torch.Tensor, saved: Saved, arguments: Arguments, needs: Needs) -> Gradients:
    *inputs, seed, offset, mask, ends_q, ends_k = saved.tensors
    _, p, causal, scale, _ = arguments
    tensors = (grad, *inputs, saved.log_sum_exp, seed, offset, mask, ends_q, ends_k)
    return Gradients(*_cudnn_backward(*tensors, *saved.facts, p, causal, scale=scale))


_offer(
    *(SDPBackend.CUDNN_ATTENTION, "cuda", SdpaKernel(_run_cudnn, _back_cudnn)),
    *(_cudnn, _cudnn_backward),
)

# Any device: attention as torch composes it of products and a softmax; 16-bit inputs become fp32.

_softmax = _operator("_safe_softmax", "self dim dtype")
_softmax_backward = _operator("_softmax_backward_data", "grad_output output dim input_dtype")
_sums_in_16_bit = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed


def _rows(query: torch.Tensor, scale: float) -> torch.Tensor:
    """`[batch * heads, queries, size]`. Queries and keys are each scaled by `sqrt(scale)`."""
    return (_in_fp32(query) * math.sqrt(scale)).flatten(0, 1)


def _columns(key: torch.Tensor, heads: int, scale: float) -> torch.Tensor:
    """`[batch * heads, size, keys]`."""
    key = _repeated(_in_fp32(key), heads).transpose(-2, -1)
    return (key * math.sqrt(scale)).flatten(0, 1)


def _values(value: torch.Tensor, heads: int) -> torch.Tensor:
    """`[batch * heads, keys, size of value]`."""
    return _repeated(_in_fp32(value), heads).flatten(0, 1)


def _in_fp32(x: torch.Tensor) -> torch.Tensor:
    half = x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if half and not _sums_in_16_bit() else x


def _repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def sum_repeated(grad: torch.Tensor, groups: int) -> torch.Tensor:
    """The gradient of keys or values, from that of copies that were repeated for query heads."""
    return grad if grad.shape[1] == groups else grad.unflatten(1, (groups, -1)).sum(2)


def _run_math(inputs: Inputs, arguments: Arguments, needs: Needs) -> tuple[torch.Tensor, Saved]:
    query, key, value = inputs
    mask, p, causal, scale, _ = arguments
    lead, queries, keys = query.shape[:2], query.shape[2], key.shape[2]
    scores = torch.bmm(_rows(query, scale), _columns(key, lead[1], scale)).unflatten(0, lead)
    addend = _addend(mask, query.dtype)
    if causal:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
        addend = _addend(seen, scores.dtype)
    if addend is not None:
        scores.add_(addend)
    weights = _softmax(scores, -1)
    factor, dropped = dropout(weights, p) if p > 0.0 else (weights, None)
    out = torch.bmm(factor.flatten(0, 1), _values(value, lead[1])).unflatten(0, lead)
    tensors = (
        query if needs.key else None,
        key if needs.query else None,
        factor if needs.value else None,
        *((value, weights, dropped) if needs.weights else (None, None, None)),
    )
    return out.to(query.dtype), Saved(None, tensors, key.shape[1])


def _back_math(grad: torch.Tensor, saved: Saved, arguments: Arguments, needs: Needs) -> Gradients:
    query, key, factor, value, weights, dropped = saved.tensors
    lead, dtype, groups, scale = grad.shape[:2], grad.dtype, saved.facts, arguments.scale
    grad_query = grad_key = grad_value = None
    grad = _in_fp32(grad).flatten(0, 1)
    if factor is not None:
        product = _product(factor.flatten(0, 1).transpose(1, 2), grad, lead)
        grad_value = sum_repeated(product, groups).to(dtype)
    if weights is not None:
        grad = _product(grad, _values(value, lead[1]).transpose(1, 2), lead)
        if dropped is not None:
            grad = dropout_backward(grad, dropped, arguments.dropout)
        grad = _softmax_backward(grad, weights, -1, weights.dtype).flatten(0, 1)
    if key is not None:
        product = _product(grad, _columns(key, lead[1], scale).transpose(1, 2), lead)
        grad_query = (product * math.sqrt(scale)).to(dtype)
    if query is not None:
        product = _product(_rows(query, scale).transpose(1, 2), grad, lead)
        product = (product * math.sqrt(scale)).transpose(-2, -1)
        grad_key = sum_repeated(product, groups).to(dtype)
    return Gradients(grad_query, grad_key, grad_value)


def _product(a: torch.Tensor, b: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """`a @ b` as `[batch, heads, ...]`; torch.autocast rounds it, as in torch's own backward."""
    return torch.bmm(a, b).to(a.dtype).unflatten(0, lead)


for _device in ("cpu", "cuda"):
    _offer(
        *(SDPBackend.MATH, _device, SdpaKernel(_run_math, _back_math)),
        *(_softmax, _softmax_backward, _sums_in_16_bit),
    )
