"""Softmax with a sink: one more score in the denominator, of a key that has no value.

vanilla       exp(s_j) / sum_k exp(s_k)
off-by-one    exp(s_j) / (1 + sum_k exp(s_k))
learnable     exp(s_j) / (exp(offset_h) + sum_k exp(s_k)), a learned offset per head
"""

from __future__ import annotations

from typing import NamedTuple

import torch

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


class Sink(NamedTuple):
    """The kind of softmax, and the score of its sink.

    Attributes:
        type: one of `SOFTMAX_TYPES`.
        offset: `[heads]`; None for `vanilla`.
    """

    type: str = "vanilla"
    offset: torch.Tensor | None = None


NO_SINK = Sink()


def check_softmax_type(name: str) -> str:
    """Return the type, or say which ones there are."""
    if name not in SOFTMAX_TYPES:
        raise ValueError(
            f"[DotProductAttention] expected softmax_type in {{{', '.join(SOFTMAX_TYPES)}}},"
            f" got {name!r}"
        )
    return name
