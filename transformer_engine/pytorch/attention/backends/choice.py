"""Which backend runs a call; `table.py` has what it may depend on."""

from __future__ import annotations

import logging
from typing import Any

import torch

from transformer_engine._env import AttentionVariables
from transformer_engine.pytorch.attention.backends.backend import (
    Backend,
    Problem,
    refusal,
)
from transformer_engine.pytorch.attention.backends.table import capability, ranked, table
from transformer_engine.pytorch.attention.core.call import NO_BIAS, Bias, Call, CallShape
from transformer_engine.pytorch.attention.core.environment import environment, repeatable
from transformer_engine.pytorch.attention.core.memoize import remembered
from transformer_engine.pytorch.notices import warn_once

_BiasFacts = tuple[str, tuple[int, ...] | None, bool, bool, torch.dtype | None]
_NO_BIAS: _BiasFacts = ("no_bias", None, False, False, None)
_SequenceFacts = tuple[int | None, int | None, bool, bool, bool]


def choose(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> Backend:
    """The backend for a call; ValueError with every backend's reason where all refuse."""
    return _choose(*_facts(query, key, value, call))


def problem_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> Problem:
    """What the choice for a call depends on."""
    return _problem(*_facts(query, key, value, call))


def _facts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
) -> tuple[
    CallShape,
    torch.device,
    torch.dtype,
    tuple[bool, float, str, str, bool],
    _BiasFacts | None,
    _SequenceFacts | None,
    bool,
    AttentionVariables,
]:
    shape, bias = call.shape, call.bias
    offset, allowed = call.sink.offset, environment()
    training = call.training or (
        torch.is_grad_enabled()
        and (
            query.requires_grad
            or key.requires_grad
            or value.requires_grad
            or (offset is not None and offset.requires_grad)
        )
    )
    return (
        shape,
        query.device,
        query.dtype,
        (training, call.dropout.p, call.sink.type, call.cache, call.casts is not None),
        None if bias is NO_BIAS else _bias_facts(bias),
        None if shape.band is not None else _sequence_facts(call),
        repeatable(allowed),
        allowed,
    )


def _bias_facts(bias: Bias) -> _BiasFacts:
    tensor = bias.tensor
    if tensor is None:
        return bias.type, None, False, bias.slopes is not None, None
    needs_grad = tensor.requires_grad and torch.is_grad_enabled()
    return bias.type, tuple(tensor.shape), needs_grad, False, tensor.dtype


def _sequence_facts(call: Call) -> _SequenceFacts:
    """The longest two where known, then: padded by mask, alike, room between."""
    of_query, of_key = call.of_query, call.of_key
    if of_query.cu_seqlens is None or of_key.cu_seqlens is None:
        return None, None, True, isinstance(call.attention_mask, torch.Tensor), False
    alike = of_query.cu_seqlens is of_key.cu_seqlens
    if call.shape.qkv_format != "thd":
        return None, None, False, alike, False
    room = of_query.cu_seqlens_padded is not None or of_key.cu_seqlens_padded is not None
    return of_query.longest, of_key.longest, False, alike, room


def _problem(
    shape: CallShape,
    device: torch.device,
    dtype: torch.dtype,
    facts: tuple[bool, float, str, str, bool],
    bias: _BiasFacts | None,
    sequences: _SequenceFacts | None,
    repeats: bool,
    allowed: AttentionVariables,
) -> Problem:
    training, dropout, softmax_type, cache, fp8 = facts
    bias_type, bias_shape, bias_grad, given_slopes, bias_dtype = bias or _NO_BIAS
    queries, keys, by_mask, alike, room = sequences or (None, None, False, True, False)
    packed = shape.qkv_format == "thd"
    return Problem(
        device=device.type,
        capability=capability(device),
        dtype=dtype,
        qkv_format=shape.qkv_format,
        rule=shape.rule,
        batch=shape.batch,
        queries=queries if packed and shape.queries else shape.queries,
        keys=keys if packed and shape.keys else shape.keys,
        heads=shape.heads,
        groups=shape.groups,
        key_size=shape.key_size,
        value_size=shape.value_size,
        bias_type=bias_type,
        bias_shape=bias_shape,
        bias_grad=bias_grad,
        bias_mixed=bias_dtype not in (None, dtype),
        given_slopes=given_slopes,
        dropout=dropout,
        training=training or bias_grad,
        repeatable=repeats,
        padded_by_mask=by_mask and shape.rule.type.padding,
        alike=alike and shape.queries == shape.keys,
        room_between=room,
        softmax_type=softmax_type,
        cache=cache,
        fp8=fp8,
        compiling=torch.compiler.is_compiling(),
    )


@remembered
def _choose(*facts: Any) -> Backend:
    problem, allowed = _problem(*facts), facts[-1]
    for backend in ranked(problem, allowed):
        if refusal(backend, problem, allowed) is None:
            _announce(problem, backend, allowed)
            return backend
    raise ValueError(
        f"[attention] no dot product attention backend is available for {problem.summary}:\n"
        f"{table(problem, allowed)}"
    )


def _announce(problem: Problem, chosen: Backend, allowed: AttentionVariables) -> None:
    """What the backend says, what NVTE_DEBUG asks to be told, and variables without effect."""
    if problem.compiling:
        return
    if notice := chosen.notice(problem, allowed):
        warn_once(notice)
    if allowed.flash_backward:
        warn_once(
            "[attention] NVTE_FUSED_ATTN_USE_FAv2_BWD=1 changes nothing: a backend runs its own"
            " backward, and cuDNN's is the faster one on Hopper"
        )
    if allowed.workspace is not None:
        warn_once(
            "[attention] NVTE_FUSED_ATTN_FORCE_WORKSPACE_OPT changes nothing: cuDNN chooses its"
            " workspace"
        )
    if allowed.debug >= 1:
        _logger().info("running with the backend %s", chosen.name)
    if allowed.debug >= 2:
        _logger().debug("%s\n%s", problem, table(problem, allowed))


@remembered
def _logger() -> logging.Logger:
    """The logger of NVTE_DEBUG, which prints even where nobody has set logging up."""
    logger = logging.getLogger("DotProductAttention")
    logger.setLevel(logging.DEBUG)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(levelname)s | %(name)s] %(message)s"))
        logger.addHandler(handler)
    return logger
