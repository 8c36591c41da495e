"""flash-attn 3, package `flash_attn_interface`: for Hopper."""

from __future__ import annotations

from transformer_engine.pytorch.attention.backends.backend import (
    EAGER,
    NO_BIAS,
    NO_DROPOUT,
    NO_SINK,
    SIZES_OF_EIGHT,
    Requirement,
)
from transformer_engine.pytorch.attention.backends.flash import Kernels, Private, package
from transformer_engine.pytorch.attention.backends.flash_parts import flash_backend

SOURCE = package("flash-attn-3", "flash_attn_interface")

KERNELS = Kernels(
    SOURCE,
    Private(
        "_flash_attn_backward",
        "_flash_attn_backward",
        "return_attn_probs",
        ("softmax_lse", "is_causal"),
        {"softcap": 0.0},
    ),
)
BACKEND = flash_backend(
    KERNELS,
    3,
    "3.0.0b1",
    Requirement(
        lambda problem, allowed: problem.capability is None or problem.capability[0] == 9,
        "needs a Hopper GPU (compute capability 9.0)",
    ),
    Requirement(
        lambda problem, allowed: (
            problem.key_size == problem.value_size <= 256
            or ((problem.key_size, problem.value_size) == (192, 128) and not problem.training)
        ),
        "takes heads of one size for keys and values, up to 256",
    ),
    SIZES_OF_EIGHT,
    Requirement(
        lambda problem, allowed: (
            problem.key_size <= 128 or not (problem.repeatable and problem.training)
        ),
        "its gradients of heads above 128 may not repeat bit for bit",
    ),
    NO_BIAS,
    NO_SINK,
    NO_DROPOUT,
    EAGER,
)
