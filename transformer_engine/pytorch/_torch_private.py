"""What torch does around every call of an autograd function, without what ours never need of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def other_autodiff_active() -> bool:
    """Whether functorch transforms this call, or forward mode differentiates it."""
    return transforms_active() or forward_ad._current_level >= 0


def bare_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What `function.apply` calls where functorch transforms nothing.

    To look for transforms, and for tensors that one has left behind, costs up to 3 us a call.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply`, bare wherever that is the same."""
    bare = bare_apply(function)

    def apply(*args: Any) -> Any:
        if _is_compiling() or transforms_active():
            return function.apply(*args)
        return bare(*args)

    return apply


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's, which switches gradients off (5 us) for a backward where they are off already."""
    guarded = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        return (guarded if _is_grad_enabled() else backward)(ctx, *gradients)

    return once
