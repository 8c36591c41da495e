"""torch's scaled_dot_product_attention: cuDNN on Hopper, else flash, memory-efficient or plain."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from transformer_engine.pytorch.attention.masks import Mask

_TORCH_ORDER = torch._C._get_sdp_priority_order()
_CUDNN = SDPBackend.CUDNN_ATTENTION.value
_CUDNN_FIRST = [_CUDNN, *(backend for backend in _TORCH_ORDER if backend != _CUDNN)]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask,
    scale: float,
    dropout: float,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(scale * query @ key^T) @ value, over the keys that the mask lets through."""
    assert bias is None, "the table of requirements refuses a bias"
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scale}
    if query.shape[1] != key.shape[1]:
        options["enable_gqa"] = True
    if mask.full or mask.causal:
        options["is_causal"] = mask.causal
        return _fastest(query, key, value, options)
    queries, keys = query.shape[2], key.shape[2]
    hidden = mask.dense(queries, keys, query.device)
    assert hidden is not None, "only a full mask hides nothing"
    hidden = torch.atleast_2d(hidden)
    if not mask.may_blind(queries, keys):
        return scaled_dot_product_attention(query, key, value, ~hidden, **options)
    # A softmax over nothing is NaN in some kernels: a query that sees no key sees all of them here,
    # and its result is then overwritten, which also stops its gradient.
    blind = hidden.all(-1, keepdim=True)
    out = scaled_dot_product_attention(query, key, value, ~hidden | blind, **options)
    return out.masked_fill(blind, 0)


def _fastest(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """Ask for cuDNN first: torch may prefer flash (version 2), at half of its speed on Hopper.

    `torch.nn.attention.sdpa_kernel(..., set_priority=True)` does the same for 20 us. An order that
    the user has set stays, and so do kernels that the user has switched off.
    """
    if (
        query.device.type != "cuda"
        or torch.compiler.is_compiling()
        or torch._C._get_sdp_priority_order() != _TORCH_ORDER
    ):
        return scaled_dot_product_attention(query, key, value, **options)
    torch._C._set_sdp_priority_order(_CUDNN_FIRST)
    try:
        return scaled_dot_product_attention(query, key, value, **options)
    finally:
        torch._C._set_sdp_priority_order(_TORCH_ORDER)
