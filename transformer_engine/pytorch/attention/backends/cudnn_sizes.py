"""Which calls of whole sequences share a graph of cuDNN with calls of similar sizes.

Building a graph for new sizes takes 50 ms, and as much for the backward. So only the first sizes of
each kind of call get a graph for exactly these sizes. All others run graphs for rounded sizes. Such
a graph serves all sizes in its range, because it reads the length and the place of each sequence
from device memory, as graphs for thd do. It takes longer: on an H200 3 to 9 % from 2048 tokens on,
and up to half as much again for small calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch.attention.backends.backend import FEW_QUERIES, Problem
from transformer_engine.pytorch.attention.backends.cudnn_support import ask
from transformer_engine.pytorch.attention.core.call import CallShape
from transformer_engine.pytorch.capture import memoize
from transformer_engine.pytorch.kernels.attention import OWN_GRAPH

MOST_OWN_GRAPHS = 16  # of a kind of call; most programs have a few sizes

_Sizes = tuple[int | None, int | None, int | None]  # batch, queries and keys
_FIELDS_OF_SHAPE = ("qkv_format", "rule", "heads", "groups", "key_size", "value_size")
# What a graph depends on beside sizes.
_FIELDS_OF_GRAPH = (*_FIELDS_OF_SHAPE, "gpu", "dtype", "bias_type", "dropout", "training")


@memoize
def lengths_to_share(
    shape: CallShape,
    gpu: int | None,
    dtype: torch.dtype,
    dropout: float,
    bias_type: str,
    repeatable: bool,
    training: bool,
) -> tuple[int, int]:
    """Queries and keys of a call that shares a graph, for `settings_of`; else `OWN_GRAPH`.

    The call has neither a bias tensor nor a sink, and all its keys are here.
    """
    problem = Problem(
        device="cuda",
        gpu=gpu,
        dtype=dtype,
        bias_type=bias_type,
        dropout=dropout,
        repeatable=repeatable,
        training=training,
        **_fields_of(shape, (*_FIELDS_OF_SHAPE, "batch", "queries", "keys")),
    )
    return (shape.queries, shape.keys) if shares(problem) else OWN_GRAPH


def shares(problem: Problem) -> bool:
    """Whether calls with this problem share a graph, which cuDNN takes.

    The answer for a problem is always the same, so that a recompute runs what the forward ran.
    """
    sizes, rule = (problem.batch, problem.queries, problem.keys), problem.rule
    if (
        None in sizes
        or problem.qkv_format == "thd"
        or rule.type.padding
        or rule.type.arbitrary
        or problem.bias_type not in ("no_bias", "alibi")
        or problem.softmax_type != "vanilla"
        or problem.part
        # `attention_key.cpp` does not round a few queries.
        or (problem.queries or 0) <= FEW_QUERIES
        # A query may see no key. Rows of zeros are written for calls with `cu_seqlens` alone.
        or (max(rule.left, rule.right) >= 0 and problem.queries != problem.keys)
    ):
        return False
    repeatable = problem.repeatable and problem.training
    kind = Problem("cuda", repeatable=repeatable, **_fields_of(problem, _FIELDS_OF_GRAPH))
    return _shares(kind, sizes)


def _fields_of(described: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(described, name) for name in names}


@memoize
def _with_own_graphs(kind: Problem) -> set[_Sizes]:
    """The sizes of calls of a kind that have graphs of their own."""
    return set()


@memoize
def _shares(kind: Problem, sizes: _Sizes) -> bool:
    own = _with_own_graphs(kind)
    if len(own) < MOST_OWN_GRAPHS:
        own.add(sizes)
    if sizes in own:
        return False
    batch, queries, keys = sizes
    return not ask(kind._replace(batch=batch, queries=queries, keys=keys), shared=True)
