"""What the tests of checkpointing share."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=3),
    "current": Float8CurrentScaling(),
    "high precision": None,
}
MODES = {
    "te": lambda f, *a: te.checkpoint(f, *a, use_reentrant=True),
    "te not reentrant": lambda f, *a: te.checkpoint(f, *a, use_reentrant=False),
    "torch": lambda f, *a: torch_checkpoint(f, *a, use_reentrant=True),
    "torch not reentrant": lambda f, *a: torch_checkpoint(f, *a, use_reentrant=False),
}
NONE = lambda f, *a: f(*a)  # noqa: E731
Wrap = Callable[..., Any]


def scope(recipe: str, **more: Any):
    chosen = RECIPES[recipe]
    return nullcontext() if chosen is None else te.fp8_autocast(fp8_recipe=chosen, **more)


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(actual) == len(expected)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, b), f"tensor {i} differs"
