"""Fused attention on CUDA: graphs of cuDNN. `csrc/ops/attention.h` is the contract.

`settings` is `(format, left, right, bottom_right, alibi, deterministic, longest query sequence,
longest key sequence)`: eight integers, made by `settings_of`. `sequences` is `(cu_seqlens_q,
cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)`, each None where it is not given.

There is no CPU kernel: `attention/backends/unfused.py` is the definition.
"""

from __future__ import annotations

import torch

from transformer_engine import _C
from transformer_engine.pytorch.dtypes import DType
from transformer_engine.pytorch.kernels.library import library_op
from transformer_engine.pytorch.kernels.memory import new_empty
from transformer_engine.pytorch.kernels.packed import empty_like_parts, empty_packed

SBHD, BSHD, THD = 0, 1, 2
NO_SEQUENCES = (None, None, None, None)
OWN_GRAPH = (0, 0)  # `longest` of calls whose graph is for exactly their sizes

# Where the gradients of query, key and value are stored. APART: in three tensors. AS_INPUTS: as
# parts of one tensor, if the inputs are parts of one. PACKED and PACKED_BY_HEAD: in one tensor
# `[..., features]`, which is returned as the query's gradient, with None for the other two. Under
# PACKED the heads of each part are adjacent, under PACKED_BY_HEAD the parts of each head.
APART, AS_INPUTS, PACKED, PACKED_BY_HEAD = range(4)

AttentionGradients = tuple[
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
]


def settings_of(
    format: int,
    window: tuple[int, int] = (-1, -1),
    bottom_right: bool = False,
    alibi: bool = False,
    deterministic: bool = False,
    longest: tuple[int, int] = OWN_GRAPH,
) -> tuple[int, ...]:
    """The `settings` of a call: all that `_C` cannot learn from the tensors.

    Args:
        format: `SBHD`, `BSHD` or `THD`.
        window: how many keys a query sees before its own position, and after it; negative for all.
        bottom_right: the last query and key have equal positions; otherwise the first ones have.
        alibi: add the usual ALiBi bias; needs `window[1] == 0`.
        deterministic: gradients repeat bit for bit.
        longest: for `THD`, upper bounds of the lengths of query and key sequences. For others, the
            tokens of queries and keys if the call shares the graph of similar sizes; then query,
            key and value and their gradients must have equal strides.
    """
    return (format, *window, int(bottom_right), int(alibi), int(deterministic), *longest)


@library_op()
def attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    settings: tuple[int, ...],
    scale: float,
    dropout: float,
    sequences: tuple[torch.Tensor | None, ...],
    bias: torch.Tensor | None,
    sink: torch.Tensor | None,
    seed: torch.Tensor | None,
    statistics: bool,
    *,
    launch: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`dropout(softmax(scale * query key^T + bias)) value` over the keys that a query sees.

    Args:
        query: `[sequence, batch, heads, size]`, `[batch, sequence, heads, size]` or
            `[tokens, heads, size]`, fp16 or bf16; any strides, of which the last is 1.
        key: likewise, with `groups` heads.
        value: likewise, with `groups` heads; its size may differ.
        settings: see the top of this file.
        scale: factor on the scores.
        dropout: probability of dropping a weight.
        sequences: see the top of this file; all None for whole sequences.
        bias: `[1 or batch, 1 or heads, queries, keys]`.
        sink: fp32 `[heads]`.
        seed: int64 `[2]`, of dropout.
        statistics: whether a backward will follow.

    Returns:
        The result, `[..., heads * size of value]`, and fp32 statistics of the softmax, one for each
        query and head in cuDNN's order; None without `statistics`.
    """
    *lead, heads, _ = query.shape
    out = new_empty(query, (*lead, heads * value.shape[-1]))
    statistics_out = empty_statistics(query, settings[0]) if statistics else None
    if launch:
        query, key, value = _aligned(query), _aligned(key), _aligned(value)
        bias = None if bias is None else _aligned(bias, torch.preserve_format)
        _C.attention_forward(
            (query, key, value),
            settings,
            scale,
            dropout,
            sequences,
            (bias, sink, seed),
            (out, statistics_out),
        )
    return out, statistics_out


def _aligned(x: torch.Tensor, order: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    """The tensor, or a copy if cuDNN could not read it 16 bytes at a time."""
    return x if x.data_ptr() % 16 == 0 else x.clone(memory_format=order)


def empty_statistics(query: torch.Tensor, format: int) -> torch.Tensor:
    """Memory for the statistics that the forward leaves for the backward."""
    if format == THD:
        shape: tuple[int, ...] = query.shape[:-1]
    else:
        first, second, heads, _ = query.shape
        shape = (second, heads, first) if format == SBHD else (first, heads, second)
    return new_empty(query, shape, torch.float32)


@library_op()
def attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    statistics: torch.Tensor,
    settings: tuple[int, ...],
    scale: float,
    dropout: float,
    sequences: tuple[torch.Tensor | None, ...],
    bias: torch.Tensor | None,
    sink: torch.Tensor | None,
    seed: torch.Tensor | None,
    needs_bias: bool,
    needs_sink: bool,
    together: int,
    *,
    launch: bool = True,
) -> AttentionGradients:
    """Gradients of query, key, value, bias and sink; arguments not listed are the forward's.

    Args:
        grad: gradient of the result, contiguous.
        out: what the forward returned; it and `grad` may also be `[..., heads, size of value]`.
        statistics: what the forward returned.
        settings: the forward's; `deterministic` only matters here.
        needs_bias: whether to make the bias gradient.
        needs_sink: whether to make the sink's gradient.
        together: where the first three gradients are stored, see `APART`. Results of an operator
            of compiled code are never parts of one tensor.
    """
    if launch:  # first, because gradients of thd have the layout of the tensors that cuDNN reads
        grad, query, key, value = _aligned(grad), _aligned(query), _aligned(key), _aligned(value)
        bias = None if bias is None else _aligned(bias, torch.preserve_format)
    inputs = (query, key, value)
    results, written = gradients_of(inputs, together, launch)
    of_bias = torch.empty_like(bias, dtype=query.dtype) if bias is not None and needs_bias else None
    of_sink = torch.empty_like(sink) if sink is not None and needs_sink else None
    if launch:
        _C.attention_backward(
            inputs,
            settings,
            scale,
            dropout,
            sequences,
            (bias, sink, seed),
            (out, statistics),
            (grad, *written, of_bias, of_sink),
        )
    if bias is not None and of_bias is not None:
        of_bias = of_bias.to(bias.dtype)
    return *results, of_bias, of_sink


_Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def gradients_of(
    inputs: tuple[torch.Tensor, ...], together: int, launch: bool
) -> tuple[_Gradients, tuple[torch.Tensor, ...]]:
    """Memory for the gradients of query, key and value.

    Returns:
        The tensors that the caller returns, and the three tensors that the kernel writes.
    """
    if together >= PACKED:
        whole, parts = empty_packed(inputs, together == PACKED_BY_HEAD, launch)
        return (whole, None, None), parts
    if together == AS_INPUTS and launch:
        parts = empty_like_parts(*inputs)
    else:
        parts = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)
    query, key, value = parts
    return (query, key, value), parts


def attention_refusal(
    sizes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device: int,
    settings: tuple[int, ...],
    dropout: float,
    padded: bool,
    bias: tuple[int, ...],
    needs_bias: bool,
    sink: bool,
    training: bool,
) -> str:
    """Why cuDNN refuses contiguous tensors of these sizes, `""` if it takes them.

    Args:
        sizes: sizes of query, key and value.
        dtype: fp16 or bf16.
        device: index of the GPU.
        settings: see the top of this file.
        dropout: probability.
        padded: each sequence has its own length.
        bias: sizes of the bias; `()` for none.
        needs_bias: whether the bias needs a gradient.
        sink: whether the softmax has a sink.
        training: whether a backward will follow.
    """
    code = int(DType.kFloat16 if dtype is torch.float16 else DType.kBFloat16)
    return _C.attention_refusal(
        sizes, code, device, settings, dropout, padded, bias, needs_bias, sink, sink, training
    )
