"""flash-attn 2, package `flash_attn`: dropout and ALiBi, for Ampere and later."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.attention.backends.backend import NO_SINK, SOME_WEIGHTS, Requirement
from transformer_engine.pytorch.attention.backends.flash import Kernels, Options, Private, package
from transformer_engine.pytorch.attention.backends.flash_parts import (
    NO_DROPOUT_IN_PARTS,
    flash_backend,
)
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.attention.masks.alibi import default_slopes

SOURCE = package("flash-attn", "flash_attn")


class _Kernels(Kernels):
    def keywords(self, said: Options, call: Call, device: torch.device) -> dict[str, Any]:
        slopes = call.bias.slopes
        if call.bias.type == "alibi" and slopes is None:
            slopes = default_slopes(call.shape.heads, device).flatten()
        return {**said._asdict(), "dropout_p": call.dropout.p, "alibi_slopes": slopes}

    def knows(self, call: Call) -> bool:
        """Not with dropout, whose random state is private, nor for sizes that the package pads."""
        return call.dropout.p == 0.0 and call.shape.key_size % 8 == 0


KERNELS = _Kernels(
    SOURCE,
    Private(
        "flash_attn_interface._flash_attn_backward",
        "flash_attn_interface._flash_attn_varlen_backward",
        "return_attn_probs",
        ("softmax_lse", "causal"),
        {"softcap": 0.0},
    ),
)
BACKEND = flash_backend(
    KERNELS,
    2,
    "2.4.1",  # the first with ALiBi and deterministic gradients
    Requirement(
        lambda problem, allowed: problem.capability is None or problem.capability >= (8, 0),
        "needs a GPU of compute capability 8.0",
    ),
    Requirement(
        lambda problem, allowed: problem.key_size == problem.value_size <= 256,
        "takes heads of one size for keys and values, up to 256",
    ),
    Requirement(
        lambda problem, allowed: problem.bias_type in ("no_bias", "alibi"),
        "takes no bias; use core_attention_bias_type 'no_bias' or 'alibi'",
    ),
    Requirement(
        lambda problem, allowed: problem.bias_type != "alibi" or not problem.padded_by_mask,
        "takes ALiBi of padded sequences with lengths only; give cu_seqlens_q and cu_seqlens_kv"
        " instead of attention_mask",
    ),
    NO_SINK,
    SOME_WEIGHTS,
    NO_DROPOUT_IN_PARTS,
    differentiable=True,
)
