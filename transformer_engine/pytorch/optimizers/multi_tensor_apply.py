"""Operations on lists of tensors, in the calling form that gradient clipping and scaling use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_CHUNK = 2048 * 32  # the chunk size that operations of other programs expect

Lists = Sequence[Sequence[torch.Tensor]]


def multi_tensor_applier(
    op: Callable[..., Any], noop_flag_buffer: torch.Tensor, tensor_lists: Lists, *args: Any
) -> Any:
    """Call an operation of this module: `op(chunk size, flag, lists, *args)`.

    Args:
        op: an operation such as `multi_tensor_scale`.
        noop_flag_buffer: int32 `[1]`; operations set it to 1 if they find Inf or NaN.
        tensor_lists: lists of equal length; tensors without elements are left out.
        args: further arguments of the operation.

    Returns:
        What the operation returns.

    Raises:
        ValueError: lists of different lengths.

    >>> flag, values = torch.zeros(1, dtype=torch.int32), [torch.ones(2), torch.ones(3)]
    >>> multi_tensor_applier(multi_tensor_scale, flag, [values, values], 0.5)
    >>> values[0], flag
    (tensor([0.5000, 0.5000]), tensor([0], dtype=torch.int32))
    """
    lengths = [len(tensors) for tensors in tensor_lists]
    if len(set(lengths)) > 1:
        raise ValueError(f"[multi_tensor_applier] expected lists of one length, got {lengths}")
    rows = [row for row in zip(*tensor_lists, strict=True) if row[0].numel()]
    lists = [[row[i] for row in rows] for i in range(len(lengths))]
    return op(_CHUNK, noop_flag_buffer, lists, *args)


def multi_tensor_scale(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: float | torch.Tensor
) -> None:
    """Write `inputs * scale`, computed in fp32, to outputs of any dtype.

    Args:
        chunk_size: has no effect.
        noop_flag: int32 `[1]`, set to 1 where an input has Inf or NaN.
        tensor_lists: inputs and outputs, which may be the same tensors.
        scale: a number, or a tensor of one.

    Raises:
        ValueError: lists of different lengths, an output of another shape than its input, or
            several scales.

    >>> source, target = [torch.full((2,), 3.0)], [torch.zeros(2, dtype=torch.float16)]
    >>> multi_tensor_scale(1, torch.zeros(1, dtype=torch.int32), [source, target], 2.0)
    >>> target
    [tensor([6., 6.], dtype=torch.float16)]
    """
    inputs, outputs = _with_elements(tensor_lists)
    if isinstance(scale, torch.Tensor):
        if scale.numel() != 1:
            raise ValueError(
                "[multi_tensor_scale] expected scale to be one number, got a tensor of shape"
                f" {tuple(scale.shape)}"
            )
        scale = scale.reshape(())
    if not inputs:
        return
    with torch.no_grad():
        largest = torch.stack(torch._foreach_norm(list(inputs), torch.inf, dtype=torch.float32))
        noop_flag |= (~largest.isfinite()).any().to(noop_flag.dtype)
        if all(output.dtype is torch.float32 for output in outputs):  # no memory is needed
            torch._foreach_copy_(list(outputs), list(inputs))
            torch._foreach_mul_(list(outputs), scale)
            return
        for x, output in zip(inputs, outputs, strict=True):
            output.copy_(x.float() * scale)


def _with_elements(tensor_lists: Lists) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Inputs and outputs that have elements, with the same shapes."""
    shapes = [[tuple(x.shape) for x in tensors] for tensors in tensor_lists]
    if len(shapes) != 2 or shapes[0] != shapes[1]:
        raise ValueError(
            "[multi_tensor_scale] expected inputs and outputs of the same shapes, got"
            f" {' and '.join(map(str, shapes))}"
        )
    inputs, outputs = ([x for x in tensors if x.numel()] for tensors in tensor_lists)
    return inputs, outputs


def multi_tensor_scale_tensor(
    chunk_size: int, is_infinite: torch.Tensor, tensor_lists: Lists, scale: torch.Tensor
) -> None:
    """`multi_tensor_scale` by a number that is on the device.

    Args:
        chunk_size: has no effect.
        is_infinite: int32 `[1]`, set to 1 where an input has Inf or NaN.
        tensor_lists: inputs and outputs, which may be the same tensors.
        scale: fp32, one number.

    >>> values = [torch.ones(2)]
    >>> flag, scale = torch.zeros(1, dtype=torch.int32), torch.tensor([4.0])
    >>> multi_tensor_scale_tensor(1, flag, [values, values], scale)
    >>> values
    [tensor([4., 4.])]
    """
    multi_tensor_scale(chunk_size, is_infinite, tensor_lists, scale)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Euclidean norm of all tensors together, in fp32.

    Args:
        chunk_size: has no effect.
        noop_flag: any tensor; for an empty list the result is on its device.
        tensor_lists: one list.
        per_tensor: also return the norm of each tensor.

    Returns:
        `(norm [1], norms [tensors])`, the second empty without `per_tensor`.

    >>> flag = torch.zeros(1, dtype=torch.int32)
    >>> multi_tensor_l2norm(1, flag, [[torch.full((9,), 1.0), torch.full((4,), 2.0)]], True)
    (tensor([5.]), tensor([3., 4.]))
    """
    (tensors,) = tensor_lists
    nothing = torch.zeros(0, dtype=torch.float32, device=noop_flag.device)
    if not tensors:
        return nothing.new_zeros(1), nothing
    with torch.no_grad():
        # On a CPU torch adds fp32 values one after the other: with 20M values the error is 1 %.
        norms = torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64))
        return norms.norm().float().reshape(1), norms.float() if per_tensor else nothing
