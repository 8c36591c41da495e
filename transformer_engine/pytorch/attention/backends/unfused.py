"""Attention as it is defined: two batched products with a masked softmax of the scores between.

It takes every problem on every device, and keeps the scores in memory. It returns a log-sum-exp
only for calls that are a part (`scores_of_parts.py`).
"""

from __future__ import annotations

import torch

from transformer_engine._env import AttentionVariables
from transformer_engine.pytorch.attention.backends import unfused_fp8
from transformer_engine.pytorch.attention.backends.backend import (
    Backend,
    Backward,
    Forward,
    Gradients,
    Needs,
    Problem,
    Requirement,
    Saved,
)
from transformer_engine.pytorch.attention.backends.dense import dense, dense_parts
from transformer_engine.pytorch.attention.backends.scores import KERNEL
from transformer_engine.pytorch.attention.backends.scores_of_parts import KERNEL_OF_PARTS, PARTS
from transformer_engine.pytorch.attention.core.call import Call

_WHOLE = dense(KERNEL)
_PART = dense(KERNEL_OF_PARTS)
_FP8 = (unfused_fp8.forward, unfused_fp8.backward)


def _pair(call: Call) -> tuple[Forward, Backward]:
    if call.part:
        return _PART
    return _WHOLE if call.casts is None else _FP8


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, needs: Needs
) -> tuple[torch.Tensor, Saved | None]:
    """See `backends/__init__.py`."""
    return _pair(call)[0](query, key, value, call, needs)


def backward(grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
    """See `backends/__init__.py`."""
    return _pair(call)[1](grad, saved, call, needs)


def _notice(problem: Problem, allowed: AttentionVariables) -> str:
    if problem.device != "cuda" or not problem.fp8 or problem.calibrating:
        return ""
    return (
        "[attention] FP8 attention runs on the backend 'unfused', which rounds as FP8 does and"
        " takes longer than attention in 16 bit; attention_backends(fp8=True, ...) says why"
        " others refuse, a recipe without fp8_dpa and fp8_mha leaves attention in 16 bit"
    )


BACKEND = Backend(
    "unfused",
    forward,
    backward,
    keeps_scores=True,
    requirements=(
        Requirement(
            lambda problem, allowed: allowed.unfused,
            "switched off by NVTE_UNFUSED_ATTN=0; it takes every problem, set it to 1",
        ),
    ),
    notice=_notice,
    parts=dense_parts(PARTS),
)
