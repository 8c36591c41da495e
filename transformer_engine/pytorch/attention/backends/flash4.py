"""flash-attn 4, package `flash_attn.cute`: for Hopper and later, compiled in the first call."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.attention.backends.backend import (
    EAGER,
    NO_BIAS,
    NO_DROPOUT,
    Requirement,
)
from transformer_engine.pytorch.attention.backends.flash import Kernels, Options, Private, package
from transformer_engine.pytorch.attention.backends.flash_parts import flash_backend
from transformer_engine.pytorch.attention.core.call import Call

SOURCE = package("flash-attn-4", "flash_attn.cute")
_SIZES = (64, 128)


class _Kernels(Kernels):
    def keywords(self, said: Options, call: Call, device: torch.device) -> dict[str, Any]:
        left, right = (None if side < 0 else side for side in said.window_size)
        keywords = {**said._asdict(), "window_size": (left, right)}
        if call.sink.offset is not None:
            keywords["learnable_sink"] = call.sink.offset
        return keywords

    def knows(self, call: Call) -> bool:
        """Not with a sink, because the private function computes no gradient of it."""
        return call.sink.offset is None


KERNELS = _Kernels(
    SOURCE, Private("interface._flash_attn_bwd", "", "return_lse", ("lse", "causal"), {})
)
BACKEND = flash_backend(
    KERNELS,
    4,
    "4.0.0b1",
    Requirement(
        lambda problem, allowed: problem.capability is None or problem.capability >= (9, 0),
        "needs a GPU of Hopper or later (compute capability 9.0)",
    ),
    # 4.0.0b36 on an H200: with heads of 16, wrong gradients and accesses out of bounds.
    Requirement(
        lambda problem, allowed: problem.key_size == problem.value_size in _SIZES,
        f"is trusted with heads of a size of {' or '.join(map(str, _SIZES))} only",
    ),
    Requirement(
        lambda problem, allowed: not (problem.part and problem.rule.type.padding),
        "returns no log-sum-exp of packed sequences, which context parallel ranks need",
    ),
    NO_BIAS,
    NO_DROPOUT,
    EAGER,
)
