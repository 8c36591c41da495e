"""Whether cuDNN itself takes a problem of attention."""

from __future__ import annotations

from collections.abc import Callable

import torch

from transformer_engine._env import AttentionVariables
from transformer_engine.pytorch.attention.backends.backend import Problem, Requirement
from transformer_engine.pytorch.attention.core.environment import environment
from transformer_engine.pytorch.capture import is_capturing
from transformer_engine.pytorch.kernels.attention import (
    BSHD,
    OWN_GRAPH,
    SBHD,
    THD,
    attention_refusal,
    settings_of,
)

FORMATS = {"sbhd": SBHD, "bshd": BSHD, "thd": THD}
NOT_ASKED = "was not asked before a CUDA graph was captured; run the layer once (a warm-up)"


def question(
    problem: Problem, shared: bool = False
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Sizes of query, key and value to ask cuDNN about, and settings.

    Unknown sizes are replaced by a batch of 2 and 512 tokens. With `shared`, the question is about
    the graph that whole sequences share with similar sizes.
    """
    rule, format = problem.rule, FORMATS[problem.qkv_format]
    batch, queries = problem.batch or 2, problem.queries or 512
    keys = problem.keys or queries
    lead = {SBHD: lambda n: (n, batch), BSHD: lambda n: (batch, n), THD: lambda n: (batch * n,)}
    sizes = (
        (*lead[format](queries), problem.heads, problem.key_size),
        (*lead[format](keys), problem.groups, problem.key_size),
        (*lead[format](keys), problem.groups, problem.value_size),
    )
    bottom_right = rule.bottom_right and max(rule.left, rule.right) >= 0
    if problem.alike if rule.type.padding else queries == keys:
        bottom_right = False
    alibi = problem.bias_type == "alibi"
    longest = (queries, keys) if shared or format == THD else OWN_GRAPH
    window = (rule.left, rule.right)
    return sizes, settings_of(format, window, bottom_right, alibi, problem.repeatable, longest)


def ask(problem: Problem, shared: bool = False) -> str:
    """Why cuDNN refuses a problem in 16 bits, `""` if it takes it; see `question`."""
    if is_capturing():
        return NOT_ASKED
    sizes, how = question(problem, shared)
    bias: tuple[int, ...] = ()
    if problem.bias_type == "post_scale_bias":
        shape = (1, problem.heads, problem.queries or 512, problem.keys or problem.queries or 512)
        bias = problem.bias_shape or shape
    return attention_refusal(
        sizes,
        problem.dtype,
        gpu_of(problem),
        how,
        problem.dropout,
        problem.rule.type.padding,
        bias,
        problem.bias_grad,
        problem.softmax_type != "vanilla",
        problem.training,
    )


def gpu_of(problem: Problem) -> int:
    """Index of the GPU to ask."""
    return torch.cuda.current_device() if problem.gpu is None else problem.gpu


def taken_by_cudnn(
    refusal: Callable[[Problem, AttentionVariables], str],
    taken_in_traces: Callable[[Problem], bool],
    reason_in_traces: str,
) -> Requirement:
    """The requirement that cuDNN takes a problem, for which `refusal` returns an empty string.

    Inside a trace, where sizes may be symbols, it gets only problems that it takes at any size.
    """

    def holds(problem: Problem, allowed: AttentionVariables) -> bool:
        return taken_in_traces(problem) if problem.compiling else not refusal(problem, allowed)

    def reason(problem: Problem) -> str:
        return reason_in_traces if problem.compiling else refusal(problem, environment())

    return Requirement(holds, reason)
