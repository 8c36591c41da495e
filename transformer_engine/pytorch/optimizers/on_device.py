"""Steps of `FusedAdam` that can be captured in a CUDA graph.

Whatever changes from step to step (number of steps, learning rate, scale, overflow) is read from
the device by the kernel, not passed by the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from transformer_engine.pytorch.kernels.adam import AdamRules, AdamTensors, adam
from transformer_engine.pytorch.optimizers.parts import Part, master_of, write_plain
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
    """Step parameters on one device in fp32, and round the results to 16-bit parameters.

    Args:
        group: a group of the optimizer, whose `step` is on the device and includes this step.
        parts: the parts of parameters that have gradients.
        states: the state of each part.
        gradients: the gradient of each part, of any dtype.
        factor: fp32, one value by which all gradients are multiplied, on the device; or None.
        found_inf: fp32, one value on the device, or None; if it is not 0, nothing is changed.
        decoupled: weight decay as in AdamW.
        corrects: correct the means for their start at zero. Without it the kernel is told that
            infinitely many steps were taken, for which the correction is 1.

    Returns:
        The new master weight of each part as it is stored; and fp32 `[1]`, the amax of the value
        for parts whose FP8 scale depends on it, else None. Parts in FP8 are not written.
    """
    values = [master_of(*one) for one in zip(parts, states, strict=True)]
    means, squares = (
        [part.own(state[name]) for part, state in zip(parts, states, strict=True)]
        for name in ("exp_avg", "exp_avg_sq")
    )
    weights = [rounded_weight(part) for part in parts]
    device = values[0].device
    scaled = [part.piece is not None and takes_amax(part.piece) for part in parts]
    zeros = iter(torch.zeros(sum(scaled), dtype=torch.float32, device=device).split(1))
    amaxes = [next(zeros) if is_scaled else None for is_scaled in scaled]
    gradients = [gradient.contiguous() for gradient in gradients]
    beta1, beta2 = group["betas"]
    adam(
        AdamTensors(values, means, squares, gradients, weights, amaxes),
        group["step"] if corrects else torch.full_like(group["step"], math.inf),
        device_count(group["lr"], device),
        None if factor is None else factor.reshape(1),
        AdamRules(beta1, beta2, group["eps"], group["weight_decay"], decoupled),
        None if found_inf is None else found_inf.reshape(1),
    )
    # Weights that are not contiguous, and fp32 weights with a master weight, are not written yet.
    new = [
        value if weight is None else weight for value, weight in zip(values, weights, strict=True)
    ]
    write_plain(parts, new)
    return values, amaxes


def rounded_weight(part: Part) -> torch.Tensor | None:
    """A 16-bit part as the kernel writes it, contiguous; None for other parts."""
    if part.piece is not None or part.local.dtype is torch.float32:
        return None
    return part.local.contiguous()
