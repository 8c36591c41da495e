"""flash-attn 3, package `flash_attn_interface`: for Hopper."""

from __future__ import annotations

from transformer_engine.pytorch.attention.backends.backend import (
    EAGER,
    NO_BIAS,
    NO_DROPOUT,
    NO_SINK,
    SIZES_OF_EIGHT,
    Backend,
    Requirement,
)
from transformer_engine.pytorch.attention.backends.flash import (
    Kernels,
    Private,
    importable,
    package,
    requirements,
)
from transformer_engine.pytorch.attention.backends.flash_parts import PARTS

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
BACKEND = Backend(
    "flash3",
    KERNELS.forward,
    KERNELS.backward,
    keeps_scores=False,
    requirements=(
        Requirement(
            lambda problem, allowed: allowed.flash3, "switched off by NVTE_FLASH_ATTN_V3=0"
        ),
        *requirements(SOURCE, "3.0.0b1"),
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
        importable(KERNELS),
    ),
    parts=PARTS,
)
