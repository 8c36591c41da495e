"""Environment variables that choose the attention backend, read at each call."""

from __future__ import annotations

import torch

from transformer_engine._env import (
    AttentionVariables,
    attention_variables,
    parsed_attention_variables,
)


def environment() -> AttentionVariables:
    """The current values of the variables; torch.compile can trace this."""
    compiling = torch.compiler.is_compiling()
    return parsed_attention_variables() if compiling else attention_variables()


def repeatable(allowed: AttentionVariables) -> bool:
    """Whether gradients must repeat bit for bit."""
    return torch.are_deterministic_algorithms_enabled() or not allowed.nondeterministic
