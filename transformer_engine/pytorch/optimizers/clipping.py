"""`clip_factor`: the factor by which a step of `FusedAdam` clips gradients, and their norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch.parallel.dtensors import is_dtensor
from transformer_engine.pytorch.parallel.groups import check_group, group_size
from transformer_engine.pytorch.parallel.norms import check_max_norm, clipping, total_norm


def clip_factor(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, tp_group: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor that clips gradients to a norm, for `FusedAdam.step(grad_factor=...)`.

    The step multiplies gradients by the factor while it reads them, so clipping needs no separate
    pass over memory. The host does not wait for the device.

    Gradients may be DTensors, as after `fully_shard`: the norm is that of the whole gradients,
    whichever are sharded or replicated. All ranks find the same norm.

    Args:
        parameters: an iterable of parameters, or one; those without a gradient do not count. On
            ranks that share parameters, the same ones must have gradients.
        max_norm: the largest Euclidean norm of all gradients together.
        tp_group: the tensor parallel ranks, which must all call this. They have parts of parameters
            whose attribute `tensor_model_parallel` is true (column-parallel and row-parallel layers
            set it, and attention whose heads ranks share), and copies of the others, which count
            once. A `Linear` sets the attribute of its weight even without a `parallel_mode`: set it
            to False if ranks have copies of it.

    Returns:
        `(norm, factor)`, fp32 of one value each, shape `[]`: the norm of the gradients as they
        are, and `min(1, max_norm / norm)`.

    Raises:
        TypeError: `tp_group` is not a process group, `max_norm` is not a number, or `parameters`
            are a module, or not tensors.
        ValueError: a `max_norm` that is negative or NaN; with `tp_group`, a DTensor that does not
            say whether ranks have parts of it, because `fully_shard` drops the attribute.
            `te.distributed.clip_grad_norm_` asks the model.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_factor([weight], 1.0)
    (tensor(5.), tensor(0.2000))

    Under `torchrun`, where ranks share layers:

    >>> import transformer_engine.pytorch as te
    >>> group = None  # or that of the ranks
    >>> layer = te.Linear(2, 2, parallel_mode="column", tp_group=group, device="cpu")
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> te.all_reduce_sequence_parallel_grads(layer)
    >>> clip_factor(layer.parameters(), 1.0, tp_group=group)[0]
    tensor(2.4495)
    """
    check_group("clip_factor", "tp_group", tp_group)
    check_max_norm("clip_factor", max_norm)
    found = [one for one in _listed(parameters) if one.grad is not None]
    gradients: list[Any] = [one.grad for one in found]
    if not gradients:
        return torch.zeros((), dtype=torch.float32), torch.ones((), dtype=torch.float32)
    cut = () if group_size(tp_group) == 1 else [_is_part(one, tp_group) for one in found]
    with torch.no_grad():
        norm = total_norm(gradients, cut, tp_group).float()
        return norm, clipping(norm, max_norm)


def _listed(parameters: Any) -> list[torch.Tensor]:
    """The parameters, of which there may be one alone."""
    if isinstance(parameters, nn.Module):
        raise TypeError(
            f"[clip_factor] expected parameters, got {type(parameters).__name__}; pass its"
            " parameters()"
        )
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for one in listed:
        if not isinstance(one, torch.Tensor):
            raise TypeError(f"[clip_factor] expected tensors, got {type(one).__name__}")
    return listed


def _is_part(parameter: torch.Tensor, group: Any) -> bool:
    """Whether the other ranks of a group have other parts of a parameter."""
    said = getattr(parameter, "tensor_model_parallel", None)
    if said is None and is_dtensor(parameter):
        mesh = parameter.device_mesh
        if group not in [mesh.get_group(i) for i in range(mesh.ndim)]:  # else placements say it
            raise ValueError(
                "[clip_factor] expected DTensors with the attribute tensor_model_parallel, True "
                "where ranks of tp_group have parts, got one without, of shape "
                f"{tuple(parameter.shape)}; te.distributed.clip_grad_norm_ asks the model"
            )
    return bool(said)
