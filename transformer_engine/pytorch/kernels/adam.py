"""One step of Adam for many tensors, each read and written once (`csrc/ops/adam.h`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from transformer_engine import _C


class AdamRules(NamedTuple):
    """The hyperparameters that are numbers of the host.

    With `decoupled`, `decay` is AdamW's: it shrinks the parameter itself. Without it,
    `decay * parameter` is added to the gradient.
    """

    beta1: float
    beta2: float
    epsilon: float
    decay: float
    decoupled: bool


class AdamTensors(NamedTuple):
    """Lists of equal length of contiguous tensors, which have the shapes of the parameters.

    Parameters whose tensors have the same dtypes share launches.

    Attributes:
        parameters: fp32, or int16 for the low bits of parameters (`stored_states.py`), whose high
            bits are their weights, in bf16.
        means: fp32 or bf16, the running means of gradients.
        squares: fp32 or bf16, the running means of squared gradients.
        gradients: fp32, fp16 or bf16.
        weights: fp16 or bf16: set to the new parameters, rounded; or None.
        amaxes: fp32 `[1]`, raised to the largest magnitude of the parameter; or None, as for all
            that have a weight.
    """

    parameters: Sequence[torch.Tensor]
    means: Sequence[torch.Tensor]
    squares: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    weights: Sequence[torch.Tensor | None]
    amaxes: Sequence[torch.Tensor | None]


def adam(
    tensors: AdamTensors,
    step: torch.Tensor,
    rate: torch.Tensor,
    factor: torch.Tensor | None,
    rules: AdamRules,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Do one step of Adam for all tensors, in place.

    Args:
        tensors: all but the gradients are written.
        step: fp32, one value on the device of the tensors: the number of this step, from 1.
        rate: fp32, one value on that device: the learning rate.
        factor: fp32, one value on that device, by which all gradients are multiplied; None for 1.
        rules: everything else.
        found_inf: fp32, one value on that device: if it is not 0, only `amaxes` are written.
    """
    _C.adam(*tensors, step, rate, factor, found_inf, rules)
    written = (*tensors.weights, *tensors.amaxes)
    torch.autograd.graph.increment_version(
        (
            *tensors.parameters,
            *tensors.means,
            *tensors.squares,
            *[one for one in written if one is not None],
        )
    )
