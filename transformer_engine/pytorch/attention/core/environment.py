"""The variables that steer attention, at the moment it is called."""

from __future__ import annotations

import torch

from transformer_engine._env import (
    AttentionVariables,
    attention_variables,
    parsed_attention_variables,
)


def environment() -> AttentionVariables:
    """The variables that choose a backend, as they are now; torch.compile can trace it."""
    compiling = torch.compiler.is_compiling()
    return parsed_attention_variables() if compiling else attention_variables()


def repeatable(allowed: AttentionVariables) -> bool:
    """Whether gradients must repeat bit for bit."""
    return torch.are_deterministic_algorithms_enabled() or not allowed.nondeterministic
