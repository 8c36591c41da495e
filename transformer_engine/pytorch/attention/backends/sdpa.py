"""torch's scaled_dot_product_attention: cuDNN on Hopper, else flash, memory-efficient or plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention
from torch.torch_version import TorchVersion

from transformer_engine.pytorch.attention.backends.backend import (
    HIGH_PRECISION,
    NO_BIAS,
    NO_SINK,
    SOMETHING,
    Backend,
    Requirement,
)
from transformer_engine.pytorch.attention.backends.dense import dense
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.attention.core.memoize import remembered
from transformer_engine.pytorch.attention.masks.masks import Mask

_HAS_GROUPS = TorchVersion(torch.__version__) >= TorchVersion("2.5")
_CUDNN = SDPBackend.CUDNN_ATTENTION.value
_TORCH_ORDER: list[int] = getattr(torch._C, "_get_sdp_priority_order", list)()
_OTHERS = [backend for backend in _TORCH_ORDER if backend != _CUDNN]
_CUDNN_FIRST, _CUDNN_LAST = [_CUDNN, *_OTHERS], [*_OTHERS, _CUDNN]


def _kernel(cached: bool) -> Callable[..., torch.Tensor]:
    """What `dense` takes; with `cached` keys come from a cache, and no sizes may come again."""

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Mask,
        scale: float,
        dropout: float,
        bias: torch.Tensor | None,
        sink: torch.Tensor | None,
    ) -> torch.Tensor:
        """softmax(scale * query @ key^T) @ value, over the keys that the mask lets through."""
        assert bias is None and sink is None, "the table of requirements refuses them"
        options: dict[str, Any] = {"dropout_p": dropout, "scale": scale}
        per_group = query.shape[1] // max(1, key.shape[1])
        if mask.full or mask.causal:
            if per_group > 1:
                options["enable_gqa"] = True
            return _fastest(query, key, value, mask.causal, cached, options)
        if per_group > 1:  # kernels that take a mask know no groups
            key, value = (x.repeat_interleave(per_group, dim=1) for x in (key, value))
        queries, keys = query.shape[2], key.shape[2]
        hidden = mask.dense(queries, keys, query.device)
        assert hidden is not None, "only a full mask hides nothing"
        hidden = torch.atleast_2d(hidden)
        if not mask.may_blind(queries, keys):
            return scaled_dot_product_attention(query, key, value, ~hidden, **options)
        # A softmax over nothing is NaN in some kernels: a query that sees no key sees all of them
        # here, and its result is then overwritten, which also stops its gradient.
        blind = hidden.all(-1, keepdim=True)
        out = scaled_dot_product_attention(query, key, value, ~hidden | blind, **options)
        return out.masked_fill(blind, 0)

    return attend


@remembered
def _has_fast_cudnn(device: int) -> bool:
    """Whether cuDNN is the fastest kernel of torch on a GPU: on Hopper and later."""
    return bool(_TORCH_ORDER) and torch.cuda.get_device_capability(device)[0] >= 9


def _fastest(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    cached: bool,
    options: dict[str, Any],
) -> torch.Tensor:
    """Run cuDNN first where it is twice as fast as the flash attention (version 2) of torch.

    It is the last where keys are cached: it would make a plan, in 10 to 100 ms, for each length of
    the cache, and of a prompt.
    `torch.nn.attention.sdpa_kernel(..., set_priority=True)` does the same for 20 us. An order that
    the user has set stays, and so do kernels that the user has switched off.
    """
    if (
        query.device.type != "cuda"
        or torch.compiler.is_compiling()
        or not _has_fast_cudnn(query.device.index)
        or torch._C._get_sdp_priority_order() != _TORCH_ORDER
    ):
        return scaled_dot_product_attention(query, key, value, is_causal=causal, **options)
    cached = cached or (query.shape[2] < key.shape[2] and not torch.is_grad_enabled())
    torch._C._set_sdp_priority_order(_CUDNN_LAST if cached else _CUDNN_FIRST)
    try:
        return scaled_dot_product_attention(query, key, value, is_causal=causal, **options)
    finally:
        torch._C._set_sdp_priority_order(_TORCH_ORDER)


_attend_plainly, _attend_cached = dense(_kernel(False)), dense(_kernel(True))


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> torch.Tensor:
    """See `backends/__init__.py`."""
    return (_attend_cached if call.cache else _attend_plainly)(query, key, value, call)


BACKEND = Backend(
    "sdpa",
    attend,
    keeps_scores=False,
    requirements=(
        Requirement(
            lambda problem, allowed: allowed.fused or allowed.flash,
            "switched off by NVTE_FUSED_ATTN=0 and NVTE_FLASH_ATTN=0; set either to 1",
        ),
        HIGH_PRECISION,
        NO_BIAS,
        NO_SINK,
        Requirement(
            lambda problem, allowed: problem.heads == problem.groups or _HAS_GROUPS,
            "has no grouped query attention before torch 2.5",
        ),
        SOMETHING,
        Requirement(
            lambda problem, allowed: (
                problem.device == "cpu" or not (problem.repeatable and problem.training)
            ),
            "its gradients on a GPU may not repeat bit for bit, as"
            " NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 or torch.use_deterministic_algorithms asks",
        ),
    ),
)
