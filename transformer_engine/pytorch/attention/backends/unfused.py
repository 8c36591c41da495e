"""Attention as it is defined: two batched products with a masked softmax of the scores between.

It takes every problem on every device, and keeps the scores in memory.
"""

from __future__ import annotations

import torch

from transformer_engine._env import AttentionVariables
from transformer_engine.pytorch.attention.backends import unfused_fp8
from transformer_engine.pytorch.attention.backends.backend import Backend, Problem, Requirement
from transformer_engine.pytorch.attention.backends.dense import dense
from transformer_engine.pytorch.attention.backends.scores import product, weighted, weights
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.attention.masks.masks import Mask


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask,
    scale: float,
    dropout: float,
    bias: torch.Tensor | None,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(scale * query @ key^T + bias) @ value, over the keys that the mask lets through."""
    scores = product(query, key, scale)
    probabilities = weights(scores, mask, bias, sink).to(query.dtype)
    if dropout > 0.0:
        probabilities = torch.nn.functional.dropout(probabilities, dropout)
    return weighted(probabilities, value)


_attend_plainly = dense(_attend)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> torch.Tensor:
    """See `backends/__init__.py`."""
    if call.casts is not None:
        return unfused_fp8.attend(query, key, value, call, call.casts)
    return _attend_plainly(query, key, value, call)


def _notice(problem: Problem, allowed: AttentionVariables) -> str:
    if not (problem.fp8 and problem.device == "cuda"):
        return ""
    return (
        "[attention] FP8 attention runs on the backend 'unfused', which rounds as FP8 does and"
        " takes longer than attention in 16 bit; attention_backends(fp8=True, ...) says why"
        " others refuse, a recipe without fp8_dpa and fp8_mha leaves attention in 16 bit"
    )


BACKEND = Backend(
    "unfused",
    attend,
    keeps_scores=True,
    requirements=(
        Requirement(
            lambda problem, allowed: allowed.unfused,
            "switched off by NVTE_UNFUSED_ATTN=0; it takes every problem, set it to 1",
        ),
    ),
    notice=_notice,
)
