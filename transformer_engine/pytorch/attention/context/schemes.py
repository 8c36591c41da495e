"""Chooses the scheme of a context parallel call, after the ranks have agreed on the call."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.attention.backends.backend import Backend
from transformer_engine.pytorch.attention.context import gather, heads, ring
from transformer_engine.pytorch.attention.context.group import ContextGroup, refusal
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.attention.masks.masks import MASK_TYPES
from transformer_engine.pytorch.capture import is_capturing
from transformer_engine.pytorch.parallel.agreement import agree


def scheme(query: torch.Tensor, needs: tuple[bool, ...], call: Call) -> Backend:
    """The backend of a call with a `ContextGroup`: it communicates, and calls other backends.

    Before the first call of each structure the ranks compare their calls, see `agree`.

    Raises:
        ValueError: on all ranks, if context parallel ranks cannot run the call.
        RuntimeError: on all ranks, if their calls differ.
    """
    context = call.context
    assert context is not None
    structure = _structure(query.dtype, needs, call)
    known = (structure, None if call.casts is None else call.casts.reduction)
    if known not in context.known and not is_capturing():
        _meet(context, structure, call)
        context.known.add(known)
        if context.comm_type == "p2p":
            ring.reserve_memory(query, call, any(needs[:3]))
    if context.heads is not None:
        return heads.BACKEND
    return gather.BACKEND if context.comm_type == "all_gather" else ring.BACKEND


_NAMES = (
    *("dtype", "format", "mask", "query heads", "key heads", "size of keys"),
    *("size of values", "sequences", "query tokens", "key tokens", "bias", "bias shape"),
    *("scale", "dropout", "softmax", "lengths", "communication", "gradients", "precision"),
)


def _structure(dtype: torch.dtype, needs: tuple[bool, ...], call: Call) -> tuple[Any, ...]:
    """What must be equal on all ranks, in the order of `_NAMES`."""
    shape, bias = call.shape, call.bias
    lengths = call.query_sequences.cu_seqlens, call.key_sequences.cu_seqlens
    assert call.context is not None
    return (
        dtype,
        shape.qkv_format,
        shape.rule,
        *(shape.heads, shape.groups, shape.key_size, shape.value_size),
        *(shape.batch, shape.queries, shape.keys),
        bias.type,
        None if bias.tensor is None else tuple(bias.tensor.shape),
        call.scale,
        call.dropout.p,
        call.sink.type,
        tuple([None if x is None else x.shape[0] - 1 for x in lengths]),
        call.context.comm_type,
        needs[:3],
        _precision(call),
    )


def _precision(call: Call) -> str:
    if call.casts is None:
        return "high precision"
    return "calibration for FP8" if call.casts.calibrating else "FP8"


def _meet(context: ContextGroup, structure: tuple[Any, ...], call: Call) -> None:
    """Raise on all ranks if one of them refuses the call, or if their calls differ."""
    refused, error = refusal(call), None
    if refused is not None:
        error = (
            f"[DotProductAttention] expected {refused.expected} with"
            f" cp_comm_type={context.comm_type!r}, got {refused.got}; {refused.advice}"
        )
    facts = dict(zip(_NAMES, structure, strict=True))
    rule = call.shape.rule
    facts["mask"] = next(name for name, kind in MASK_TYPES.items() if kind == rule.type)
    facts["window"] = (rule.left, rule.right)
    groups = [group for group in (context.heads, context.group) if group is not None]
    agree("DotProductAttention", groups, "a call of attention", facts, error)
