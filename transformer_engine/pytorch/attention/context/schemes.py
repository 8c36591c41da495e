"""Chooses the scheme of a context parallel call, after the ranks have agreed on the call."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.attention.backends.backend import Backend, Needs
from transformer_engine.pytorch.attention.backends.choice import choose_inside
from transformer_engine.pytorch.attention.context import gather, heads, ring
from transformer_engine.pytorch.attention.context.codes import dtype_of_parts
from transformer_engine.pytorch.attention.context.group import (
    ContextGroup,
    refusal,
    refusal_of_lengths,
)
from transformer_engine.pytorch.attention.context.parts import backend_of
from transformer_engine.pytorch.attention.context.tensors import (
    check_tensors_of_call,
    values_of_lengths,
)
from transformer_engine.pytorch.attention.core.call import Call, CallTensors
from transformer_engine.pytorch.attention.core.environment import environment
from transformer_engine.pytorch.attention.masks.masks import mask_name
from transformer_engine.pytorch.capture import is_capturing
from transformer_engine.pytorch.parallel import agreement


def scheme(query: torch.Tensor, needs: tuple[bool, ...], call: Call) -> Backend:
    """The backend of a call with a `ContextGroup`: it communicates, and calls other backends.

    Before the first call of each structure the ranks compare their calls, see `agree`, and find out
    whether all of them have a backend for each part. In later calls each rank checks only the
    lengths of sequences, which must be equal on all ranks. After `MOST_COMPARED` structures the
    ranks compare no others.

    Raises:
        ValueError: on all ranks that compare the call, if context parallel ranks cannot run it.
        RuntimeError: on all ranks, if their calls differ.
    """
    context = call.context
    assert context is not None
    structure = _structure(query.dtype, needs, call)
    known = (structure, None if call.casts is None else call.casts.reduction, environment())
    if known not in context.known:
        if not is_capturing():
            error = _error(query, needs, call)
            if len(context.known) < agreement.MOST_COMPARED:
                _meet(context, structure, call, error)
                context.known.add(known)
            elif error is not None:
                raise error
            if context.comm_type == "p2p":
                ring.reserve_memory(query, call, any(needs[:3]))
    elif (refused := refusal_of_lengths(call)) is not None:
        raise ValueError(refused.text(context.comm_type))
    if context.heads is not None:
        return heads.BACKEND
    return gather.BACKEND if context.comm_type == "all_gather" else ring.BACKEND


_NAMES = (
    *("dtype", "format", "mask", "query heads", "key heads", "size of keys"),
    *("size of values", "sequences", "query tokens", "key tokens"),
    *("mask shape", "mask dtype", "bias", "bias shape", "bias dtype", "learned bias"),
    *("shape of alibi_slopes", "scale", "dropout", "softmax", "lengths"),
    *("communication", "gradients", "precision", "return_max_logit"),
)


def _structure(dtype: torch.dtype, needs: tuple[bool, ...], call: Call) -> tuple[Any, ...]:
    """What must be equal on all ranks, in the order of `_NAMES`."""
    shape, bias = call.shape, call.bias
    lengths = call.query_sequences.cu_seqlens, call.key_sequences.cu_seqlens
    kind = shape.rule.type
    masked = kind.arbitrary or (kind.padding and lengths[0] is None)  # else nobody reads a mask
    assert call.context is not None
    return (
        dtype,
        shape.qkv_format,
        shape.rule,
        *(shape.heads, shape.groups, shape.key_size, shape.value_size),
        *(shape.batch, shape.queries, shape.keys),
        _sizes(call.attention_mask) if masked else None,
        _dtypes(call.attention_mask) if masked else None,
        bias.type,
        _sizes(bias.tensor),
        _dtypes(bias.tensor),
        bias.tensor is not None and bias.tensor.requires_grad,
        _sizes(bias.slopes),
        call.scale,
        call.dropout.p,
        call.sink.type,
        tuple([None if x is None else x.shape[0] - 1 for x in lengths]),
        call.context.comm_type,
        needs[:3],
        _precision(call),
        call.max_logit,
    )


def _sizes(x: Any) -> Any:
    """The shape of a mask or bias, or the shapes of a pair of masks; None for None."""
    if isinstance(x, tuple | list):
        return tuple([_sizes(one) for one in x])
    return tuple(x.shape) if isinstance(x, torch.Tensor) else None


def _dtypes(x: Any) -> Any:
    """The dtype of a mask or bias, or the dtypes of a pair of masks; None for None."""
    if isinstance(x, tuple | list):
        return tuple([_dtypes(one) for one in x])
    return getattr(x, "dtype", None)


def _precision(call: Call) -> str:
    if call.casts is None:
        return "high precision"
    return "calibration for FP8" if call.casts.calibrating else "FP8"


# Where the fields of `Needs` are in `CallPlan.needs`.
_NEEDS = (0, 1, 2, *[3 + CallTensors._fields.index(name) for name in ("bias", "sink")])


def _error(query: torch.Tensor, needs: tuple[bool, ...], call: Call) -> Exception | None:
    """The error of this rank for a call that it cannot run; None if it can."""
    context = call.context
    assert context is not None
    refused = refusal(call)
    if refused is not None:
        return ValueError(refused.text(context.comm_type))
    try:
        check_tensors_of_call(call)
        _check_backends(query, Needs(*[needs[i] for i in _NEEDS]), call)
    except (ValueError, TypeError) as error:
        return error
    return None


def _check_backends(query: torch.Tensor, needs: Needs, call: Call) -> None:
    """Raise ValueError if no backend takes the call, or one of its parts.

    Parts differ between ranks. If a rank found this out in the middle of a call, others would wait.
    """
    device, dtype, context = query.device, query.dtype, call.context
    if context is not None and context.heads is not None:
        call = heads.call_after_exchange(call, device)
        context = call.context
    if context is None:
        choose_inside(device, dtype, needs, call)
        return
    if call.casts is not None:
        casts = call.casts._replace(dtype=dtype_of_parts(query, call, needs))
        call = call._replace(casts=casts)
    own = gather if context.comm_type == "all_gather" else ring
    for part in own.parts(query, call):
        backend_of(part, dtype, needs, device)


def _meet(
    context: ContextGroup, structure: tuple[Any, ...], call: Call, error: Exception | None
) -> None:
    """Raise on all ranks if one of them has an error, or if their calls differ."""
    facts = dict(zip(_NAMES, structure, strict=True))
    if error is None:
        facts |= values_of_lengths(call)
    rule = call.shape.rule
    facts["mask"] = mask_name(rule.type)
    facts["window"] = (rule.left, rule.right)
    groups = [group for group in (context.heads, context.group) if group is not None]
    text = None if error is None else str(error)
    try:
        agreement.agree("DotProductAttention", groups, "a call of attention", facts, text)
    except ValueError:
        if isinstance(error, TypeError):
            raise error from None
        raise
