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
        [local_part(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq")
    )
    device = values[0].device
    scaled = [part.piece is not None and takes_amax(part.piece) for part in parts]
    zeros = iter(torch.zeros(sum(scaled), dtype=torch.float32, device=device).split(1))
    amaxes = [next(zeros) if is_scaled else None for is_scaled in scaled]
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for i, (_, local, piece) in enumerate(parts):
        dtype = local.dtype
        rounded = piece is None and dtype is not torch.float32 and local.is_contiguous()
        stored = (values[i].dtype, means[i].dtype, squares[i].dtype)
        kind = (dtype if rounded else None, gradients[i].dtype, *stored, scaled[i])
        kinds.setdefault(kind, []).append(i)
    beta1, beta2 = group["betas"]
    rules = AdamRules(beta1, beta2, group["eps"], group["weight_decay"], decoupled)
    rate = device_count(group["lr"], device)
    steps = group["step"] if corrects else torch.full_like(group["step"], math.inf)
    factor = None if factor is None else factor.reshape(1)
    found_inf = None if found_inf is None else found_inf.reshape(1)
    for (weight_dtype, *_), members in kinds.items():
        tensors = AdamTensors(
            [values[i] for i in members],
            [means[i] for i in members],
            [squares[i] for i in members],
            [gradients[i].contiguous() for i in members],
            [] if weight_dtype is None else [parts[i].local for i in members],
            [amax for i in members if (amax := amaxes[i]) is not None],
        )
        adam(tensors, steps, rate, factor, rules, found_inf)
        if weight_dtype is None:
            write_plain([parts[i] for i in members], [values[i] for i in members])
    return values, amaxes
