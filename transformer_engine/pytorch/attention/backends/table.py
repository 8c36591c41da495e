"""The table of requirements: which backend takes which problem, and why others do not."""

from __future__ import annotations

import torch

from transformer_engine._env import AttentionVariables, attention_variables
from transformer_engine.pytorch.attention.backends import BACKENDS
from transformer_engine.pytorch.attention.backends.backend import Backend, Problem, refusal
from transformer_engine.pytorch.attention.backends.policy import preference
from transformer_engine.pytorch.attention.core.call import check_bias_type
from transformer_engine.pytorch.attention.core.environment import repeatable
from transformer_engine.pytorch.attention.core.formats import check_format
from transformer_engine.pytorch.attention.core.memoize import remembered
from transformer_engine.pytorch.attention.core.sink import check_softmax_type
from transformer_engine.pytorch.attention.masks.masks import Window, as_window, mask_rule
from transformer_engine.pytorch.module.parameters import default_device


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


@remembered
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
) -> BackendTable:
    """Which attention backends take a problem, and why the others do not.

    Arguments are those of `DotProductAttention` and its `forward`; of tensors only the shape, or
    whether there is one. The environment counts as it is now.

    Args:
        num_attention_heads: query heads.
        kv_channels: size of a head; a pair for keys and values of their own sizes.
        num_gqa_groups: key and value heads; None for as many as query heads.
        attention_dropout: probability of dropping an attention weight.
        qkv_format: `sbhd`, `bshd` or `thd`.
        attn_mask_type: see `DotProductAttention`.
        window_size: `(left, right)`.
        bottom_right_diagonal: alignment of windows whose type is not causal.
        softmax_type: `vanilla`, `off-by-one` or `learnable`.
        core_attention_bias_type: `no_bias`, `pre_scale_bias`, `post_scale_bias` or `alibi`.
        core_attention_bias_shape: of the bias; None is `[1, heads, queries, keys]`.
        core_attention_bias_requires_grad: the bias is learned.
        alibi_slopes: slopes of your own are given.
        batch_size: sequences; None is unknown, and so are the two lengths.
        max_seqlen_q: tokens of the longest query sequence.
        max_seqlen_kv: tokens of the longest key sequence.
        attention_mask: padding is given as a mask rather than as cu_seqlens.
        pad_between_seqs: there is room between the sequences of thd.
        inference_params: `""` without a cache; else the `kind` of the `InferenceParams`.
        fp8: attention in FP8.
        dtype: of queries, keys and values.
        device: None is cuda where there is one, else cpu.
        is_training: a backward will follow.
        deterministic: gradients must repeat bit for bit; None is what the environment and torch's
            switch ask for.

    Returns:
        Names in the order of preference, each with the reason why it refuses, or None.

    Example:
        >>> table = attention_backends(core_attention_bias_type="alibi", device="cpu")
        >>> table.chosen
        'unfused'
    """
    allowed = attention_variables()
    device = default_device(device)
    key_size, value_size = (kv_channels,) * 2 if isinstance(kv_channels, int) else kv_channels
    rule = mask_rule(attn_mask_type, as_window(window_size), bottom_right_diagonal)
    problem = Problem(
        device=device.type,
        capability=capability(device),
        dtype=dtype,
        qkv_format=check_format(qkv_format),
        rule=rule,
        batch=batch_size,
        queries=max_seqlen_q,
        keys=max_seqlen_kv,
        heads=num_attention_heads,
        groups=num_attention_heads if num_gqa_groups is None else num_gqa_groups,
        key_size=key_size,
        value_size=value_size,
        bias_type=check_bias_type(core_attention_bias_type),
        bias_shape=core_attention_bias_shape,
        bias_grad=core_attention_bias_requires_grad,
        given_slopes=alibi_slopes,
        dropout=attention_dropout,
        training=is_training,
        repeatable=repeatable(allowed) if deterministic is None else deterministic,
        padded_by_mask=attention_mask and rule.type.padding,
        alike=max_seqlen_q == max_seqlen_kv,
        room_between=pad_between_seqs,
        softmax_type=check_softmax_type(softmax_type),
        cache=inference_params,
        fp8=fp8,
    )
    return table(problem, allowed)
