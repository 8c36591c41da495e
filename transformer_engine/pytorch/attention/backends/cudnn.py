"""cuDNN's fused attention, through cuDNN graphs that this library builds.

It takes tensors of every format with the strides that they have, and computes nothing for the
padding of thd.

The log-sum-exp is `[batch, heads, queries]`, and `[tokens, heads]` for thd. It includes the sink,
and is +inf for a query that sees no key. With ALiBi it is that of cuDNN's own scores, whose bias is
`slope * (key - query)`.

A graph is built in the first call with its shapes (similar lengths may share a graph, see
`cudnn_sizes.py`), which takes tenths of a second. No graph can be built while a CUDA graph is
captured, so a capture runs only shapes that have run before.
"""

from __future__ import annotations

import torch

from transformer_engine.pytorch._torch_private import constant_in_graphs
from transformer_engine.pytorch.attention.backends.backend import (
    ASKABLE,
    FEW_ELEMENTS,
    FEW_QUERIES_IF_CACHED,
    FUSED,
    GPU,
    HIGH_PRECISION,
    SIZES_OF_EIGHT,
    SOME_WEIGHTS,
    SOMETHING,
    Backend,
    Gradients,
    Needs,
    Parts,
    Problem,
    Requirement,
    Saved,
)
from transformer_engine.pytorch.attention.backends.cudnn_sizes import lengths_to_share, shares
from transformer_engine.pytorch.attention.backends.cudnn_support import FORMATS, ask, taken_by_cudnn
from transformer_engine.pytorch.attention.backends.dense import check_bias_shape
from transformer_engine.pytorch.attention.backends.strides import readable_by_cudnn
from transformer_engine.pytorch.attention.core import formats
from transformer_engine.pytorch.attention.core.call import Call, CallShape, Sequences
from transformer_engine.pytorch.attention.core.environment import environment, repeatable
from transformer_engine.pytorch.attention.core.projections import layout_of, views
from transformer_engine.pytorch.attention.masks.masks import mask_rule
from transformer_engine.pytorch.capture import memoize
from transformer_engine.pytorch.kernels.attention import (
    APART,
    AS_INPUTS,
    NO_SEQUENCES,
    OWN_GRAPH,
    PACKED,
    PACKED_BY_HEAD,
    attention_backward,
    attention_forward,
    settings_of,
)
from transformer_engine.pytorch.kernels.memory import contiguous

_NO_EXTRAS = (None, None, None, *NO_SEQUENCES)


def new_seed(device: torch.device) -> torch.Tensor:
    """A seed, drawn on the device by torch's generator, so each replay of a graph has its own."""
    return torch.randint(2**31, (2,), device=device)


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, needs: Needs
) -> tuple[torch.Tensor, Saved | None]:
    """See `backends/__init__.py`."""
    shape, bias, sink = call.shape, call.bias.tensor, call.sink.offset
    training = any(needs)
    deterministic = training and repeatable(environment())
    sequences: tuple[torch.Tensor | None, ...] = NO_SEQUENCES
    same = False
    if shape.band is None:
        ends_q, ends_kv = call.query_sequences.cu_seqlens, call.key_sequences.cu_seqlens
        same = ends_q is ends_kv and shape.queries == shape.keys
        sequences, longest = _sequences(call)
    else:
        longest = _lengths_to_share(query, call, deterministic, training)
    how = settings_for(shape, same, call.bias.type == "alibi", deterministic, longest)
    dropout, _, seed = call.dropout
    sink_dtype = None if sink is None else sink.dtype
    if sink is not None:
        sink = sink.float()
    if bias is not None:
        check_bias_shape(bias, (shape.batch or 0, shape.heads, shape.queries, shape.keys))
        bias = bias.contiguous()
    placed = training and bias is None and (shape.band is None or longest != OWN_GRAPH)
    query, key, value = readable_by_cudnn(query, key, value, placed=placed)
    options = (how, call.scale, dropout)
    out, statistics = attention_forward(
        query, key, value, *options, sequences, bias, sink, seed, training
    )
    if not training:
        return out, None
    plain = bias is None and sink is None and seed is None and shape.band is not None
    extras = () if plain else (bias, sink, seed, *sequences)
    return out, Saved(statistics, (query, key, value, out, *extras), (options, sink_dtype))


def backward(grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
    """See `backends/__init__.py`."""
    query, key, value, out, *extras = saved.tensors
    bias, sink, seed, *sequences = extras or _NO_EXTRAS
    (settings, scale, dropout), sink_dtype = saved.facts
    statistics = saved.log_sum_exp
    assert statistics is not None
    together, layout = AS_INPUTS, None
    if torch.compiler.is_compiling():  # operators return no parts of one tensor
        layout = layout_of(query, key, value)
        together = APART if layout is None else PACKED_BY_HEAD if layout.interleaved else PACKED
    grad_query, grad_key, grad_value, grad_bias, grad_sink = attention_backward(
        grad.contiguous(),
        query,
        key,
        value,
        out,
        statistics,
        settings,
        scale,
        dropout,
        tuple(sequences),
        bias,
        sink,
        seed,
        needs.bias,
        needs.sink,
        together,
    )
    if layout is not None:
        assert grad_query is not None
        grad_query, grad_key, grad_value = views(grad_query, layout)
    if grad_sink is not None:
        grad_sink = grad_sink.to(sink_dtype)
    return needs.pick(grad_query, grad_key, grad_value, grad_bias, grad_sink)


def log_sum_exp_of_part(saved: Saved, call: Call) -> torch.Tensor:
    """See `Parts`."""
    found = saved.log_sum_exp
    assert found is not None
    if call.shape.qkv_format == "thd":
        return found
    return found.permute(2, 0, 1) if call.shape.qkv_format == "sbhd" else found.transpose(1, 2)


def _restore(
    stripped: Saved, tensors: tuple[torch.Tensor, ...], lse: torch.Tensor, call: Call
) -> Saved:
    *inputs, out = tensors
    shape = call.shape
    placed = shape.band is None and call.bias.tensor is None
    inputs = [*readable_by_cudnn(*inputs, placed=placed)]
    tensors = (*inputs, contiguous(out), *stripped.tensors)
    return Saved(statistics_of_part(lse, call), tensors, stripped.facts)


def statistics_of_part(lse: torch.Tensor, call: Call) -> torch.Tensor:
    """The log-sum-exp of `Parts` in cuDNN's order."""
    if call.shape.qkv_format != "thd":
        lse = lse.permute(1, 2, 0) if call.shape.qkv_format == "sbhd" else lse.transpose(1, 2)
    return contiguous(lse)


def _sequences(call: Call) -> tuple[tuple[torch.Tensor | None, ...], tuple[int, int]]:
    """Both `cu_seqlens`, then both `cu_seqlens_padded`; and for thd the longest lengths."""
    query, key = call.query_sequences, call.key_sequences
    ends_q, starts_q = query.checked("cu_seqlens_q")
    ends_k, starts_k = key.checked("cu_seqlens_kv")
    batch = ends_q.shape[0] - 1 if call.shape.batch is None else call.shape.batch
    formats.check_batch(batch, ends_q, ends_k)
    if call.shape.qkv_format != "thd":
        return (ends_q, ends_k, None, None), OWN_GRAPH
    longest_query = _longest(query, ends_q)
    same = ends_k is ends_q and key.longest is None
    longest = (longest_query, longest_query if same else _longest(key, ends_k))
    return (ends_q, ends_k, starts_q, starts_k), longest


def _lengths_to_share(
    query: torch.Tensor, call: Call, repeats: bool, training: bool
) -> tuple[int, int]:
    """See `lengths_to_share`. In compiled code sizes may be symbols, so that no graph is shared."""
    bias, sink = call.bias.tensor, call.sink.offset
    if torch.compiler.is_compiling() or call.part or bias is not None or sink is not None:
        return OWN_GRAPH
    how = (call.dropout.p, call.bias.type, repeats, training)
    return lengths_to_share(call.shape, query.device.index, query.dtype, *how)


def _longest(sequences: Sequences, ends: torch.Tensor) -> int:
    """The longest length, at least 1; without `max_seqlen` the host reads it from the device."""
    return max(1, int(ends.diff().max()) if sequences.longest is None else sequences.longest)


@memoize
def settings_for(
    shape: CallShape, same: bool, alibi: bool, repeatable: bool, longest: tuple[int, int]
) -> tuple[int, ...]:
    """CuDNN's settings for the shape of a call, see `settings_of`.

    With `same`, each sequence has as many queries as keys, so that the top-left and the
    bottom-right diagonal are the same.
    """
    band, rule = shape.band, shape.rule
    if band is not None:
        window, bottom_right = (band.left, band.right), band.diagonal != 0
    else:
        window, bottom_right = (rule.left, rule.right), rule.bottom_right and not same
    if max(window) < 0:
        bottom_right = False
    return settings_of(FORMATS[shape.qkv_format], window, bottom_right, alibi, repeatable, longest)


@memoize
def _refusal(problem: Problem) -> str:
    """Why cuDNN itself refuses a problem."""
    return "" if shares(problem) else ask(problem)


def _ordinary(problem: Problem) -> bool:
    rule = problem.rule
    return (
        problem.key_size == problem.value_size <= 128
        and problem.dropout == 0.0
        and (problem.bias_type, problem.softmax_type) == ("no_bias", "vanilla")
        and not problem.windowed
        and (problem.alike or not (rule.type.causal or rule.type.padding))
    )


@constant_in_graphs
def _is_here() -> bool:
    large = Problem(device="cuda", rule=mask_rule("no_mask"), queries=2048)
    return not _refusal(Problem(device="cuda")) and not _refusal(large)


def _bias_is_whole(problem: Problem) -> bool:
    if problem.bias_type == "alibi":
        return True
    shape, sizes = problem.bias_shape, (problem.queries, problem.keys)
    return problem.qkv_format != "thd" and (shape is None or shape[2:] == sizes)


def _alibi_is_ours(problem: Problem) -> bool:
    """Whether cuDNN's ALiBi, `slope * (key - query)`, gives the same softmax as ours.

    Ours is `-slope * |query + keys - queries - key|` (`masks/alibi.py`). If no query sees a key
    behind the bottom-right diagonal, the two differ by a constant for each query, which the softmax
    cancels.
    """
    rule = problem.rule
    few_queries = (problem.queries or 0) <= (problem.keys or problem.queries or 0)
    in_order = problem.alike or (few_queries and not rule.type.padding)
    return rule.type.causal and in_order and not problem.given_slopes


def _recordable(call: Call) -> bool:
    """Whether equal calls do the same: not if the host reads lengths from the device."""
    return call.shape.qkv_format != "thd" or call.query_sequences.longest is not None


def _settings(call: Call) -> Call:
    """See `Backend`. Calls with similar `max_seqlen` share a plan, as they share a graph."""
    own = call.settings()
    if call.shape.qkv_format != "thd" or torch.compiler.is_compiling():
        return own
    return own._replace(
        query_sequences=_with_few_lengths(own.query_sequences),
        key_sequences=_with_few_lengths(own.key_sequences),
    )


def _with_few_lengths(sequences: Sequences) -> Sequences:
    """Sequences whose `longest` is rounded up as in `attention_key.cpp`."""
    longest = sequences.longest
    if not isinstance(longest, int):
        return sequences
    step = 1 << max(longest.bit_length() - 3, 4)
    return sequences._replace(longest=-(-longest // step) * step)


BACKEND = Backend(
    "cudnn",
    forward,
    backward,
    keeps_scores=False,
    draw_seed=new_seed,
    recordable=_recordable,
    records_on=("cuda",),
    settings=_settings,
    parts=Parts(log_sum_exp_of_part, lambda saved, call: saved.stripped(), _restore),
    requirements=(
        FUSED,
        GPU,
        ASKABLE,
        Requirement(
            lambda problem, allowed: problem.dtype in (torch.float16, torch.bfloat16),
            "takes float16 and bfloat16 alone",
        ),
        HIGH_PRECISION,
        SOMETHING,
        FEW_ELEMENTS,
        Requirement(
            lambda problem, allowed: not problem.rule.type.arbitrary,
            "takes no arbitrary mask",
        ),
        Requirement(
            lambda problem, allowed: not problem.padded_by_mask,
            "takes padding as lengths; give cu_seqlens_q and cu_seqlens_kv instead of a mask",
        ),
        # cuDNN 9.19 on an H200: wrong results in sbhd and bshd where a part has none of a sequence.
        Requirement(
            lambda problem, allowed: (
                not (problem.part and problem.rule.type.padding) or problem.qkv_format == "thd"
            ),
            "serves context parallel ranks whose sequences are padded in the format thd alone",
        ),
        SIZES_OF_EIGHT,
        Requirement(
            lambda problem, allowed: max(problem.key_size, problem.value_size) <= 256,
            "takes heads up to a size of 256",
        ),
        Requirement(
            lambda problem, allowed: problem.bias_type != "pre_scale_bias",
            "adds no bias before scaling; use core_attention_bias_type='post_scale_bias'",
        ),
        Requirement(
            lambda problem, allowed: problem.bias_type == "no_bias" or _bias_is_whole(problem),
            "adds a bias of all queries and keys alone, and none to thd",
        ),
        Requirement(
            lambda problem, allowed: not (problem.bias_grad and problem.bias_mixed),
            "makes the gradient of a bias in the dtype of queries alone",
        ),
        Requirement(
            lambda problem, allowed: problem.bias_type != "alibi" or _alibi_is_ours(problem),
            "has ALiBi with the usual slopes and causal masks alone, for no more queries than keys",
        ),
        SOME_WEIGHTS,
        FEW_QUERIES_IF_CACHED,
        # One query with padding: cuDNN 9.19 on an H200 computes wrong gradients, 9.26 computes NaN
        # or crashes. Graphs for thd always have room for more, see attention_key.cpp.
        Requirement(
            lambda problem, allowed: (
                not problem.training or problem.queries != 1 or problem.qkv_format == "thd"
            ),
            "has wrong gradients of a single query",
        ),
        taken_by_cudnn(
            lambda problem, allowed: _refusal(problem),
            lambda problem: _ordinary(problem) and _is_here(),
            "is for plain attention alone inside torch.compile, and for builds with cuDNN",
        ),
    ),
)
