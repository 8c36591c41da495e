"""Requirements that several backends have."""

from __future__ import annotations

from transformer_engine.pytorch.attention.backends.backend import Requirement

_FEW = 16  # queries of a step that writes on, not of a prompt

SOMETHING = Requirement(
    lambda problem, allowed: not problem.empty, "needs at least one query and one key"
)
GPU = Requirement(lambda problem, allowed: problem.device == "cuda", "needs a GPU")
# Of backends that are graphs of cuDNN, which itself is asked for the rest.
FUSED = Requirement(
    lambda problem, allowed: allowed.fused, "switched off by NVTE_FUSED_ATTN=0; set it to 1"
)
ASKABLE = Requirement(
    lambda problem, allowed: problem.capability is not None, "cannot be asked without a GPU"
)
NO_CACHE = Requirement(
    lambda problem, allowed: not problem.cache,
    "would build a graph for each length that a cache grows to",
)
HIGH_PRECISION = Requirement(
    lambda problem, allowed: not problem.fp8,
    "does not compute in FP8; use a recipe without fp8_dpa and fp8_mha",
)
NO_BIAS = Requirement(
    lambda problem, allowed: problem.bias_type == "no_bias",
    "takes no bias and no ALiBi; use core_attention_bias_type='no_bias'",
)
NO_SINK = Requirement(
    lambda problem, allowed: problem.softmax_type == "vanilla",
    "has no sink in its softmax; use softmax_type='vanilla'",
)
NO_DROPOUT = Requirement(
    lambda problem, allowed: problem.dropout == 0.0, "has no dropout; use attention_dropout=0"
)
EAGER = Requirement(
    lambda problem, allowed: not problem.compiling,
    "is no operator of torch.compile; run attention outside of it",
)
FEW_QUERIES_IF_CACHED = Requirement(
    lambda problem, allowed: (
        not problem.cache or (problem.cache == "fixed" and (problem.queries or 1) <= _FEW)
    ),
    "would build a graph for each length that a cache grows to, or that a prompt has",
)
SIZES_OF_EIGHT = Requirement(
    lambda problem, allowed: problem.key_size % 8 == 0 and problem.value_size % 8 == 0,
    "takes heads of a size divisible by 8",
)
