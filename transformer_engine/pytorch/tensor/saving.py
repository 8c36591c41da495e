"""Functions that autograd functions of other programs call around `save_for_backward`."""

from __future__ import annotations

from typing import Any

import torch


def prepare_for_saving(*tensors: torch.Tensor | None) -> tuple[list[Any], list[None]]:
    """Tensors for `save_for_backward`, and what `restore_from_saved` needs beside them.

    Quantised tensors are tensors here, which autograd saves as they are.

    Args:
        tensors: plain ones, quantised ones and None.

    Returns:
        `(to_save, objects)`.

    >>> to_save, objects = prepare_for_saving(torch.ones(2), None)
    >>> restore_from_saved(objects, to_save)
    [tensor([1., 1.]), None]
    """
    return list(tensors), [None] * len(tensors)


def restore_from_saved(
    tensors: list[None], saved_tensors: Any, return_saved_tensors: bool = False
) -> Any:
    """The tensors that were given to `prepare_for_saving`.

    Args:
        tensors: the objects that it returned.
        saved_tensors: `ctx.saved_tensors`, from the first of these tensors on.
        return_saved_tensors: also return those that follow.

    Returns:
        A list; or `(list, others)`.

    >>> saved = [torch.ones(2), torch.zeros(2)]
    >>> restore_from_saved([None], saved, return_saved_tensors=True)
    ([tensor([1., 1.])], [tensor([0., 0.])])
    """
    count = len(tensors)
    restored = list(saved_tensors[:count])
    return (restored, list(saved_tensors[count:])) if return_saved_tensors else restored


def restore_from_func_ctx(ctx: Any) -> list[Any]:
    """`restore_from_saved` of `ctx.saved_tensors`.

    Args:
        ctx: of an autograd function; `ctx.tensor_objects` is what `prepare_for_saving` returned.

    >>> class Double(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         tensors, ctx.tensor_objects = prepare_for_saving(x)
    ...         ctx.save_for_backward(*tensors)
    ...         return x * x
    ...
    ...     @staticmethod
    ...     def backward(ctx, grad):
    ...         (x,) = restore_from_func_ctx(ctx)
    ...         return 2 * x * grad
    >>> x = torch.tensor([3.0], requires_grad=True)
    >>> Double.apply(x).backward()
    >>> x.grad
    tensor([6.])
    """
    return restore_from_saved(ctx.tensor_objects, ctx.saved_tensors)
