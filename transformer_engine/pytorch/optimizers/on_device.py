"""Steps of `FusedAdam` without host values, which can be captured in a CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from transformer_engine.pytorch.kernels.adam import AdamRules, AdamTensors, adam
from transformer_engine.pytorch.optimizers.parts import Part, fp32_value
from transformer_engine.pytorch.parallel.dtensors import local_part
from transformer_engine.pytorch.tensor.writing import takes_amax


def device_count(count: Any, device: torch.device) -> torch.Tensor:
    """The number of steps as fp32 `[1]` on the device, from a tensor or a number of the host."""
    if isinstance(count, torch.Tensor):
        return count.to(device, torch.float32).reshape(1)
    return torch.full((1,), float(count), dtype=torch.float32, device=device)


def step_on_device(
    group: Mapping[str, Any],
    parts: Sequence[Part],
    states: Sequence[Mapping[str, torch.Tensor]],
    gradients: Sequence[torch.Tensor],
    factor: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    decoupled: bool,
    corrects: bool,
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Step parameters on one device, and round those of fewer bits.

    Args:
        group: of the optimizer; `step` is on the device, and counts this one.
        parts: of parameters that have gradients.
        states: of each.
        gradients: of each, of any dtype.
        factor: fp32, of all gradients, on their device, or None.
        found_inf: fp32, on their device, or None; where it is not 0, parts and states stay.
        decoupled: AdamW.
        corrects: correct means for their start at zero; endless steps correct by nothing.

    Returns:
        What each part is now, in fp32, and the largest magnitude of those whose scale in FP8 it
        decides, fp32 `[1]`. Parts in FP8 are not written.
    """
    values = [fp32_value(*one) for one in zip(parts, states, strict=True)]
    scaled = [part.piece is not None and takes_amax(part.piece) for part in parts]
    zeros = iter(values[0].new_zeros(sum(scaled)).split(1))
    amaxes = [next(zeros) if is_scaled else None for is_scaled in scaled]
    kinds: dict[tuple[torch.dtype, torch.dtype | None, bool], list[int]] = {}
    for i, (_, local, piece) in enumerate(parts):
        dtype = local.dtype
        rounded = piece is None and dtype is not torch.float32 and local.is_contiguous()
        kind = (gradients[i].dtype, dtype if rounded else None, scaled[i])
        kinds.setdefault(kind, []).append(i)
    beta1, beta2 = group["betas"]
    rules = AdamRules(beta1, beta2, group["eps"], group["weight_decay"], decoupled)
    rate = device_count(group["lr"], values[0].device)
    steps = group["step"] if corrects else torch.full_like(group["step"], math.inf)
    factor = None if factor is None else factor.reshape(1)
    found_inf = None if found_inf is None else found_inf.reshape(1)
    for (_, weight_dtype, _), members in kinds.items():
        tensors = AdamTensors(
            [values[i] for i in members],
            [local_part(states[i]["exp_avg"]) for i in members],
            [local_part(states[i]["exp_avg_sq"]) for i in members],
            [gradients[i].contiguous() for i in members],
            [] if weight_dtype is None else [parts[i].local for i in members],
            [amax for i in members if (amax := amaxes[i]) is not None],
        )
        adam(tensors, steps, rate, factor, rules, found_inf)
    for (_, local, piece), value in zip(parts, values, strict=True):
        if piece is None and not local.is_contiguous():
            local.copy_(value)
    return values, amaxes
