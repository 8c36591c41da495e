"""Which backend takes a problem: the table of requirements, and the choice for a call."""

from __future__ import annotations

import logging
from typing import Any

import torch

from transformer_engine._env import AttentionVariables, attention_variables
from transformer_engine.pytorch.attention.backends import BACKENDS
from transformer_engine.pytorch.attention.backends.backend import (
    MOST_ELEMENTS,
    Backend,
    Needs,
    Problem,
    refusal,
)
from transformer_engine.pytorch.attention.backends.policy import preference
from transformer_engine.pytorch.attention.core.arguments import check_heads
from transformer_engine.pytorch.attention.core.call import (
    NO_BIAS,
    Bias,
    Call,
    CallShape,
    check_bias_type,
    check_comm_type,
    check_softmax_type,
)
from transformer_engine.pytorch.attention.core.environment import environment, repeatable
from transformer_engine.pytorch.attention.core.formats import check_format, check_mask_of_format
from transformer_engine.pytorch.attention.masks.masks import (
    MaskRule,
    Window,
    as_window,
    mask_rule,
)
from transformer_engine.pytorch.capture import memoize
from transformer_engine.pytorch.fp8.process_state import process_state
from transformer_engine.pytorch.module.parameters import device_of
from transformer_engine.pytorch.notices import warn_once

_BiasFacts = tuple[str, tuple[int, ...] | None, bool, bool, torch.dtype | None]
_NO_BIAS: _BiasFacts = ("no_bias", None, False, False, None)
_SequenceFacts = tuple[int | None, int | None, bool, bool]


def choose(device: torch.device, dtype: torch.dtype, recorded: bool, call: Call) -> Backend:
    """The backend for a call on tensors of this device and dtype.

    Raises:
        ValueError: all backends refuse, with the reason of each.
    """
    return _choose(*_facts(device, dtype, recorded, call))


def choose_inside(device: torch.device, dtype: torch.dtype, needs: Needs, call: Call) -> Backend:
    """`choose` inside of a forward, where tensors require no gradients: `needs` says which do."""
    bias = call.bias.tensor
    if bias is not None and needs.bias:
        call = call._replace(bias=Bias(call.bias.type, bias.detach().requires_grad_()))
    with torch.set_grad_enabled(needs.bias):
        return choose(device, dtype, any(needs), call)


def problem_of(device: torch.device, dtype: torch.dtype, recorded: bool, call: Call) -> Problem:
    """What the choice for a call depends on."""
    return _problem(*_facts(device, dtype, recorded, call))


def _facts(
    device: torch.device, dtype: torch.dtype, recorded: bool, call: Call
) -> tuple[
    CallShape,
    torch.device,
    torch.dtype,
    tuple[bool, float, str, str, bool, bool, bool, bool],
    _BiasFacts | None,
    _SequenceFacts | None,
    bool,
    AttentionVariables,
]:
    shape, bias, allowed = call.shape, call.bias, environment()
    return (
        shape,
        device,
        dtype,
        (
            call.training or recorded,
            call.dropout.p,
            call.sink.type,
            call.cache,
            call.casts is not None,
            call.casts is not None and call.casts.calibrating,
            process_state().captures_graphs,
            call.part,
        ),
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
    """`queries` and `keys` (None if unknown), `padded_by_mask` and `alike` of `Problem`."""
    query, key = call.query_sequences, call.key_sequences
    if query.cu_seqlens is None or key.cu_seqlens is None:
        return None, None, True, isinstance(call.attention_mask, torch.Tensor)
    alike = query.cu_seqlens is key.cu_seqlens
    if call.shape.qkv_format != "thd":
        return None, None, False, alike
    if getattr(query.cu_seqlens, "shape", None) == (1,):  # no sequence, nothing to attend to
        return 0, 0, False, alike
    return query.longest, key.longest, False, alike


def _problem(
    shape: CallShape,
    device: torch.device,
    dtype: torch.dtype,
    facts: tuple[bool, float, str, str, bool, bool, bool, bool],
    bias: _BiasFacts | None,
    sequences: _SequenceFacts | None,
    repeats: bool,
    allowed: AttentionVariables,
) -> Problem:
    training, dropout, softmax_type, cache, fp8, calibrating, in_graph, part = facts
    bias_type, bias_shape, bias_grad, given_slopes, bias_dtype = bias or _NO_BIAS
    queries, keys, by_mask, alike = sequences or (None, None, False, True)
    packed = shape.qkv_format == "thd"
    return Problem(
        device=device.type,
        gpu=device.index,
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
        softmax_type=softmax_type,
        cache=cache,
        fp8=fp8,
        calibrating=calibrating,
        compiling=torch.compiler.is_compiling(),
        in_graph=in_graph,
        part=part,
        large_packed=packed and shape.elements >= MOST_ELEMENTS,
    )


@memoize
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
    """Show the backend's notice, warn of variables without effect, log what NVTE_DEBUG asks for."""
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


@memoize
def _logger() -> logging.Logger:
    """The logger for NVTE_DEBUG, which prints even if the program has not configured logging."""
    logger = logging.getLogger("DotProductAttention")
    logger.setLevel(logging.DEBUG)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(levelname)s | %(name)s] %(message)s"))
        logger.addHandler(handler)
    return logger


class BackendTable(dict[str, str | None]):
    """Why each backend refuses a problem, in the order of preference; None for those that take it.

    The first that takes the problem runs. As a string it is a table.
    """

    @property
    def chosen(self) -> str | None:
        """Name of the backend that runs; None where all refuse."""
        return next((name for name, reason in self.items() if reason is None), None)

    def __str__(self) -> str:
        width = max(map(len, self))
        chosen = self.chosen
        return "\n".join(
            f"  {name:{width}}  {_status(reason, name == chosen)}" for name, reason in self.items()
        )


def _status(reason: str | None, chosen: bool) -> str:
    if reason is not None:
        return f"refuses: {reason}"
    return "runs" if chosen else "could run too"


def ranked(problem: Problem, allowed: AttentionVariables) -> list[Backend]:
    """All backends, the preferred one first."""
    order = preference(problem, allowed)
    return sorted(BACKENDS, key=lambda backend: (*order, backend.name).index(backend.name))


def table(problem: Problem, allowed: AttentionVariables) -> BackendTable:
    """What every backend says of a problem."""
    return BackendTable(
        (backend.name, refusal(backend, problem, allowed)) for backend in ranked(problem, allowed)
    )


@memoize
def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU; None for other devices, and where there is no GPU to ask."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.minor


def attention_backends(
    *,
    num_attention_heads: int = 16,
    kv_channels: int | tuple[int, int] = 64,
    num_gqa_groups: int | None = None,
    attention_dropout: float = 0.0,
    qkv_format: str = "sbhd",
    attn_mask_type: str = "causal",
    window_size: Window | None = None,
    bottom_right_diagonal: bool | None = None,
    softmax_type: str = "vanilla",
    core_attention_bias_type: str = "no_bias",
    core_attention_bias_shape: tuple[int, ...] | None = None,
    core_attention_bias_requires_grad: bool = False,
    alibi_slopes: bool = False,
    batch_size: int | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    attention_mask: bool = False,
    pad_between_seqs: bool = False,
    inference_params: str = "",
    fp8: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    is_training: bool = True,
    deterministic: bool | None = None,
    cp_comm_type: str | None = None,
) -> BackendTable:
    """Which attention backends take a problem, and why the others do not.

    Arguments are those of `DotProductAttention` and its `forward`. For a tensor, they say only its
    shape, or whether there is one. Environment variables, and whether `set_capture_start` has been
    called, are read at the time of this call.

    Args:
        num_attention_heads: number of query heads.
        kv_channels: size of a head; a pair for keys and values of their own sizes.
        num_gqa_groups: number of key and value heads; None for as many as query heads.
        attention_dropout: probability of dropping an attention weight; read with `is_training`.
        qkv_format: `sbhd`, `bshd` or `thd`.
        attn_mask_type: see `DotProductAttention`; for `thd` a padding type.
        window_size: `(left, right)`.
        bottom_right_diagonal: align windows of non-causal mask types bottom-right; None is True.
        softmax_type: `vanilla`, `off-by-one` or `learnable`.
        core_attention_bias_type: `no_bias`, `pre_scale_bias`, `post_scale_bias` or `alibi`.
        core_attention_bias_shape: shape of the bias; None is `[1, heads, queries, keys]`.
        core_attention_bias_requires_grad: the bias needs a gradient.
        alibi_slopes: slopes are given, instead of ALiBi's default ones.
        batch_size: number of sequences; None if unknown.
        max_seqlen_q: tokens of the longest query sequence; None if unknown.
        max_seqlen_kv: tokens of the longest key sequence; None if unknown.
        attention_mask: padding is given as a mask rather than as cu_seqlens.
        pad_between_seqs: without effect.
        inference_params: `""` without a cache; else the `kind` of the `InferenceParams`.
        fp8: attention in FP8.
        dtype: of queries, keys and values.
        device: None is cuda where there is one, else cpu.
        is_training: a backward will follow.
        deterministic: gradients must repeat bit for bit; None is what the environment and torch's
            switch ask for.
        cp_comm_type: how context parallel ranks communicate; None without context parallelism.

    Returns:
        Names in the order of preference, each with the reason why it refuses, or None.

    Raises:
        ValueError: devices, formats, masks, biases, kinds of softmax or of communication that do
            not exist; heads that do not fit together; a format that the mask does not fit.
        TypeError: windows that are no pairs of integers.

    Example:
        >>> table = attention_backends(core_attention_bias_type="alibi", device="cpu")
        >>> table.chosen
        'unfused'
    """
    allowed, device = attention_variables(), device_of("attention_backends", None, device)
    groups, sizes = check_heads(None, num_attention_heads, num_gqa_groups, kv_channels)
    problem = Problem(
        device=device.type,
        gpu=device.index,
        capability=capability(device),
        dtype=dtype,
        qkv_format=check_format(qkv_format),
        rule=_rule(qkv_format, attn_mask_type, window_size, bottom_right_diagonal),
        batch=batch_size,
        queries=max_seqlen_q,
        keys=max_seqlen_kv,
        heads=num_attention_heads,
        groups=groups,
        key_size=sizes[0],
        value_size=sizes[1],
        bias_type=check_bias_type(core_attention_bias_type),
        bias_shape=core_attention_bias_shape,
        bias_grad=core_attention_bias_requires_grad,
        given_slopes=alibi_slopes,
        dropout=attention_dropout if is_training else 0.0,
        training=is_training,
        repeatable=repeatable(allowed) if deterministic is None else deterministic,
        padded_by_mask=attention_mask and "padding" in attn_mask_type,
        alike=max_seqlen_q == max_seqlen_kv,
        softmax_type=check_softmax_type(softmax_type),
        cache=inference_params,
        fp8=fp8,
        in_graph=process_state().captures_graphs,
        part=_in_parts(cp_comm_type),
    )
    return table(problem, allowed)


def _rule(
    qkv_format: str, mask_type: str, window: Window | None, bottom_right: bool | None
) -> MaskRule:
    rule = mask_rule(mask_type, as_window(window), bottom_right)
    check_mask_of_format(qkv_format, rule.type.padding, mask_type)
    return rule


def _in_parts(cp_comm_type: str | None) -> bool:
    """Whether a backend sees only a part of the keys at a time."""
    if cp_comm_type is None:
        return False
    check_comm_type(cp_comm_type)
    return cp_comm_type != "a2a"
