"""What torch does around every call of an autograd function, without what ours never need of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel as _DistributedDataParallel

_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


has_global_module_hooks: Callable[[], bool] = torch.nn.modules.module._has_any_global_hook
_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


def saved_tensors_hooks_active() -> bool:
    """Whether what autograd saves now passes through hooks."""
    return _top_hooks(True) is not None


def in_distributed_data_parallel() -> bool:
    """Whether the forward of a DistributedDataParallel is running."""
    return _DistributedDataParallel._active_ddp_module is not None


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


def release_saved_tensors(ctx: Any) -> None:
    """Let go of the tensors that a node has saved, once its backward has taken them.

    Each is then freed as soon as the backward drops it, not when it ends. A graph that is retained
    keeps them. Seen in torch 2.5 to 2.13; where it is missing, they are freed at the end.
    """
    release = getattr(ctx, "maybe_clear_saved_tensors", None)
    if release is not None:
        release()


def not_differentiable(gradients: Sequence[Any], layer: str) -> tuple[Any, ...]:
    """Gradients for a graph of the backward (`create_graph=True`), whose own backward is an error.

    Args:
        gradients: without autograd; None where there is none.
        layer: for the message.
    """
    where = f" (layer {layer})" if layer else ""
    message = (
        "[backward] expected one backward of layers of transformer_engine, got a second one through"
        f" their gradients: gradients of gradients are not supported{where}"
    )
    error: Any = torch._C._functions.DelayedError(message.encode(), len(gradients))
    return tuple(error(*[g if g is None else g.detach().requires_grad_() for g in gradients]))


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's, which switches gradients off (5 us) for a backward where they are off already."""
    guarded = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        return (guarded if _is_grad_enabled() else backward)(ctx, *gradients)

    return once
