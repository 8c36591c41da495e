"""Which backend runs a problem.

One table of requirements serves the choice, the error and the explanation alike: the first backend
that meets all its requirements runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.torch_version import TorchVersion

from transformer_engine._env import AttentionVariables, attention_variables
from transformer_engine.pytorch.attention.backends import sdpa, unfused
from transformer_engine.pytorch.attention.remember import remembered

BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")

_SDPA_HAS_GROUPS = TorchVersion(torch.__version__) >= TorchVersion("2.5")


class Problem(NamedTuple):
    """What the choice depends on."""

    device: str
    bias_type: str = "no_bias"
    grouped: bool = False
    empty: bool = False
    repeatable: bool = False
    softmax_type: str = "vanilla"


class Requirement(NamedTuple):
    """A condition, and what to tell the user where it does not hold."""

    holds: Callable[[Problem, AttentionVariables], bool]
    reason: str


class Backend(NamedTuple):
    """A way to compute attention.

    Attributes:
        name: what errors and explanations call it.
        attend: see `backends/__init__.py`.
        keeps_scores: whether `checkpoint_core_attention` saves memory with it.
        requirements: all of them must hold.
    """

    name: str
    attend: Callable[..., torch.Tensor]
    keeps_scores: bool
    requirements: tuple[Requirement, ...]


BACKENDS = (
    Backend(
        "sdpa",
        sdpa.attend,
        keeps_scores=False,
        requirements=(
            Requirement(
                lambda problem, allowed: allowed.fused or allowed.flash,
                "switched off by NVTE_FUSED_ATTN=0 and NVTE_FLASH_ATTN=0; set either to 1",
            ),
            Requirement(
                lambda problem, allowed: problem.bias_type == "no_bias",
                "takes no bias and no ALiBi; use core_attention_bias_type='no_bias'",
            ),
            Requirement(
                lambda problem, allowed: problem.softmax_type == "vanilla",
                "has no sink in its softmax; use softmax_type='vanilla'",
            ),
            Requirement(
                lambda problem, allowed: not problem.grouped or _SDPA_HAS_GROUPS,
                "has no grouped query attention before torch 2.5",
            ),
            Requirement(
                lambda problem, allowed: not problem.empty,
                "needs at least one query and one key",
            ),
            Requirement(
                lambda problem, allowed: problem.device == "cpu" or not problem.repeatable,
                "its gradients on a GPU may not repeat bit for bit, as"
                " NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 or torch.use_deterministic_algorithms asks",
            ),
        ),
    ),
    Backend(
        "unfused",
        unfused.attend,
        keeps_scores=True,
        requirements=(
            Requirement(
                lambda problem, allowed: allowed.unfused,
                "switched off by NVTE_UNFUSED_ATTN=0; it takes every problem, set it to 1",
            ),
        ),
    ),
)


def _refusal(backend: Backend, problem: Problem, allowed: AttentionVariables) -> str | None:
    for requirement in backend.requirements:
        if not requirement.holds(problem, allowed):
            return requirement.reason
    return None


@remembered
def _choose(problem: Problem, allowed: AttentionVariables) -> Backend:
    for backend in BACKENDS:
        if _refusal(backend, problem, allowed) is None:
            return backend
    reasons = "".join(f"\n  {b.name}: {_refusal(b, problem, allowed)}" for b in BACKENDS)
    raise ValueError(f"[attention] no dot product attention backend is available:{reasons}")


def choose(device: str, bias_type: str, grouped: bool, empty: bool, softmax_type: str) -> Backend:
    """The backend for a problem, see `Problem`; ValueError with every backend's reason."""
    allowed = attention_variables()
    repeatable = not allowed.nondeterministic or torch.are_deterministic_algorithms_enabled()
    problem = Problem(device, bias_type, grouped, empty, repeatable, softmax_type)
    return _choose(problem, allowed)


def attention_backends(problem: Problem) -> dict[str, str | None]:
    """Why each backend refuses a problem; None for those that take it, the first of which runs.

    Example:
        >>> attention_backends(Problem("cpu", bias_type="alibi"))["unfused"] is None
        True
    """
    allowed = attention_variables()
    return {backend.name: _refusal(backend, problem, allowed) for backend in BACKENDS}
