"""Steps of `FusedAdam` without host values, which can be captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from transformer_engine.pytorch.dtypes import HIGH_PRECISION
from transformer_engine.pytorch.kernels.adam import AdamRules, AdamTensors, adam
from transformer_engine.pytorch.kernels.sum_squares import sum_squares
from transformer_engine.pytorch.parallel.dtensors import is_dtensor, local_part, whole_value
from transformer_engine.pytorch.tensor.shards import piece_of
from transformer_engine.pytorch.tensor.writing import takes_amax


def clip_factor(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor that clips gradients to a norm, for `FusedAdam.step(grad_factor=...)`.

    The step multiplies by it, so clipping needs no pass of its own. The host does not wait for the
    device.

    Args:
        parameters: those without a gradient do not count; or a single one.
        max_norm: of all gradients together, in the Euclidean sense.

    Returns:
        `(norm, factor)`, fp32 of one value each: the norm of the gradients as they are, and
        `min(1, max_norm / norm)`.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_factor([weight], 1.0)
    (tensor(5.), tensor(0.2000))
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(()), torch.ones(())
    with torch.no_grad():
        norm = _norm(gradients)
        return norm, (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Of all gradients together, in fp32."""
    if all([one.dtype in HIGH_PRECISION and not is_dtensor(one) for one in gradients]):
        return sum_squares([one.contiguous() for one in gradients]).sum().sqrt()
    # torch 2.15 cannot find those of a list of DTensors together.
    norms = [
        torch.linalg.vector_norm(one, 2, dtype=torch.promote_types(one.dtype, torch.float32))
        for one in gradients
    ]
    return whole_value(torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms])))


def device_count(count: Any, device: torch.device) -> torch.Tensor:
    """The number of steps as fp32 `[1]` on the device, from a tensor or a number of the host."""
    if isinstance(count, torch.Tensor):
        return count.to(device, torch.float32).reshape(1)
    return torch.full((1,), float(count), device=device)


def step_on_device(
    group: Mapping[str, Any],
    parameters: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, torch.Tensor]],
    gradients: Sequence[torch.Tensor],
    factor: torch.Tensor | None,
    decoupled: bool,
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Step parameters on one device, and round those of fewer bits.

    Args:
        group: of the optimizer; `step` is on the device, and counts this one.
        parameters: that have gradients; pieces of sharded ones.
        states: of each.
        gradients: of each, of any dtype.
        factor: of all gradients, or None.
        decoupled: AdamW.

    Returns:
        What each parameter is now, in fp32, and the largest magnitude of those whose scale in FP8
        it decides, fp32 `[1]`. Parameters in FP8 are not written.
    """
    values = [
        local_part(state["master_param"])
        if "master_param" in state
        else local_part(parameter).float().contiguous()
        for parameter, state in zip(parameters, states, strict=True)
    ]
    pieces = [piece_of(parameter) for parameter in parameters]
    scaled = [piece is not None and takes_amax(piece) for piece in pieces]
    zeros = iter(values[0].new_zeros(sum(scaled)).split(1))
    amaxes = [next(zeros) if is_scaled else None for is_scaled in scaled]
    kinds: dict[tuple[torch.dtype, torch.dtype | None, bool], list[int]] = {}
    for i, parameter in enumerate(parameters):
        rounded = parameter.dtype is not torch.float32 and parameter.is_contiguous()
        rounded = rounded and pieces[i] is None
        kind = (gradients[i].dtype, parameter.dtype if rounded else None, scaled[i])
        kinds.setdefault(kind, []).append(i)
    beta1, beta2 = group["betas"]
    rules = AdamRules(beta1, beta2, group["eps"], group["weight_decay"], decoupled)
    rate = device_count(group["lr"], values[0].device)
    factor = None if factor is None else whole_value(factor).to(torch.float32).reshape(1)
    for (_, weight_dtype, _), members in kinds.items():
        tensors = AdamTensors(
            [values[i] for i in members],
            [local_part(states[i]["exp_avg"]) for i in members],
            [local_part(states[i]["exp_avg_sq"]) for i in members],
            [local_part(gradients[i]).contiguous() for i in members],
            [] if weight_dtype is None else [local_part(parameters[i]) for i in members],
            [amax for i in members if (amax := amaxes[i]) is not None],
        )
        adam(tensors, group["step"], rate, factor, rules)
    for parameter, value in zip(parameters, values, strict=True):
        if not parameter.is_contiguous():
            local_part(parameter).copy_(value)
    return values, amaxes
