"""One step of Adam for many tensors, each read and written once (`csrc/ops/adam.h`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from transformer_engine import _C


class AdamRules(NamedTuple):
    """What the host decides. `decoupled` is AdamW's decay, of the parameter itself."""

    beta1: float
    beta2: float
    epsilon: float
    decay: float
    decoupled: bool


class AdamTensors(NamedTuple):
    """Lists of equal length, all contiguous; shapes are those of the parameters.

    Attributes:
        parameters: fp32.
        means: fp32, of gradients.
        squares: fp32, of their squares.
        gradients: of one dtype, fp32, fp16 or bf16.
        weights: of one dtype, fp16 or bf16, which become the parameters, rounded; or none.
        amaxes: fp32 `[1]`, raised to the largest magnitude of each parameter; or none, and none
            where there are weights.
    """

    parameters: Sequence[torch.Tensor]
    means: Sequence[torch.Tensor]
    squares: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    weights: Sequence[torch.Tensor]
    amaxes: Sequence[torch.Tensor] = ()


def adam(
    tensors: AdamTensors,
    step: torch.Tensor,
    rate: torch.Tensor,
    factor: torch.Tensor | None,
    rules: AdamRules,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Step all of them.

    Args:
        tensors: are written, but gradients.
        step: fp32, one value on their device: the number of this step, from 1.
        rate: fp32, one value on their device: the learning rate.
        factor: fp32, one value on their device: of all gradients.
        rules: everything else.
        found_inf: fp32, one value on their device: where it is not 0, only `amaxes` are written.
    """
    _C.adam(*tensors, step, rate, factor, found_inf, rules)
    torch.autograd.graph.increment_version(
        (*tensors.parameters, *tensors.means, *tensors.squares, *tensors.weights, *tensors.amaxes)
    )
