"""Attention in torch's own operators, for ONNX export: any mask, bias, group and softmax.

Sizes may be symbolic, so nothing here depends on their values. It computes what `unfused` does.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad, softmax

from transformer_engine.pytorch.attention.backends.backend import (
    NO_BACKWARD,
    Gradients,
    Inputs,
    Needs,
    Saved,
)
from transformer_engine.pytorch.attention.backends.dense import Kernel, dense
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.attention.masks.masks import Mask


def _attend(
    inputs: Inputs, mask: Mask, bias: torch.Tensor | None, call: Call, needs: Needs
) -> tuple[torch.Tensor, None]:
    """softmax(scale * query @ key^T + bias) @ value; calls with dropout do not come here."""
    (query, key, value), sink = inputs, call.sink.offset
    heads, groups = query.shape[1], key.shape[1]
    if heads != groups:
        key, value = (x.repeat_interleave(heads // groups, dim=1) for x in (key, value))
    scores = torch.matmul(query * call.scale, key.transpose(-1, -2))
    if bias is not None:
        scores = scores + bias.float()
    scores = scores.float()
    keys = key.shape[2]
    hidden = mask.dense(query.shape[2], keys, query.device)
    if sink is not None:
        column = sink.float().view(1, heads, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
        hidden = None if hidden is None else pad(hidden, (0, 1))
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    weights = softmax(scores, dim=-1)
    if hidden is not None and _may_blind(mask):
        weights = weights.masked_fill(hidden, 0.0)
    return torch.matmul(weights[..., :keys].to(query.dtype), value), None


def _may_blind(mask: Mask) -> bool:
    """Whether the mask may hide all keys from a query, whose softmax then is NaN."""
    top_left_causal = isinstance(mask.diagonal, int) and mask.diagonal == 0 and mask.left < 0
    return mask.hidden is not None or not top_left_causal


def _no_backward(grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
    raise AssertionError("a graph of ONNX has no backward")


_forward, _ = dense(Kernel(_attend, _no_backward))


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> torch.Tensor:
    """The result of a call, in the call's format."""
    return _forward(query, key, value, call, NO_BACKWARD)[0]
