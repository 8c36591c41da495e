"""Environment variables that choose the attention backend, read in each call."""

from __future__ import annotations

import torch

from transformer_engine._env import AttentionVariables, attention_variables
from transformer_engine.pytorch._torch_private import constant_in_graphs


@constant_in_graphs
def environment() -> AttentionVariables:
    """The current values of the variables; a compiled graph keeps those of its trace."""
    return attention_variables()


def repeatable(allowed: AttentionVariables) -> bool:
    """Whether gradients must repeat bit for bit."""
    return torch.are_deterministic_algorithms_enabled() or not allowed.nondeterministic
